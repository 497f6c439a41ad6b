"""The `sparsity` section: checked whole; sparse training itself is not part of this version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.components import add_lack, check_plain
from modelzoo_trainer.config.positions import (
    Mapping,
    Node,
    Place,
    Sequence,
    describe,
    is_null,
)
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.errors import suggest

Fraction = Annotated[float, Field(ge=0, lt=1)]  # of the weights that are zero
Count = Annotated[int, Field(ge=0)]
Period = Annotated[int, Field(gt=0)]
InitMethod = Literal["random", "topk", "from_zeros", "checkerboard"]
Filter = str | list[str] | dict[str, Any]


def _static(
    *,
    sparsity: Fraction,
    init_method: InitMethod = "random",
    param_filter: Filter | None = None,
) -> None:
    """Keep one mask."""


def _gmp(
    *,
    schedule: Fraction | dict[str, Any] | None = None,
    sparsity: Fraction | dict[str, Any] | None = None,
    update: dict[str, Any] | None = None,
    init_method: InitMethod = "topk",
    param_filter: Filter | None = None,
) -> None:
    """Raise the sparsity by magnitude pruning."""


def _set(  # noqa: PLR0913  # the section's keys
    *,
    schedule: Fraction | dict[str, Any] | None = None,
    sparsity: Fraction | dict[str, Any] | None = None,
    update: dict[str, Any],
    drop_fraction: Fraction | dict[str, Any] = 0.3,
    init_method: InitMethod = "random",
    param_filter: Filter | None = None,
    ensure_sparsity_fraction: bool | None = None,
) -> None:
    """Drop the smallest weights and grow others at random."""


def _rigl(  # noqa: PLR0913  # the section's keys
    *,
    schedule: Fraction | dict[str, Any] | None = None,
    sparsity: Fraction | dict[str, Any] | None = None,
    update: dict[str, Any],
    drop_fraction: Fraction | dict[str, Any] = 0.3,
    balance_in_groups: int | None = None,
    balance_out_groups: int | None = None,
    init_method: InitMethod = "random",
    param_filter: Filter | None = None,
) -> None:
    """Drop the smallest weights and grow those with the largest gradients."""


def _group(*, groups: list[dict[str, Any]]) -> None:
    """Have an algorithm for each group of parameters."""


def _update_every(*, freq: Period, start: Count | None = None, stop: Count | None = None) -> None:
    """Update at regular steps."""


def _update_at(*, steps: list[Count]) -> None:
    """Update at listed steps."""


def _constant(*, value: float) -> None:
    """Stay."""


def _linear(*, init: float, slope: float) -> None:
    """Go on by `slope` a step."""


def _exp(*, init: float, gamma: float, final: float = 1.0) -> None:
    """Approach `final` exponentially."""


def _power(*, init: float, beta: float, final: float = 1.0) -> None:
    """Approach `final` as a power."""


def _cosine(*, init: float, half_period: Period, minimum: float = 0.0) -> None:
    """Follow a cosine from `init` to `minimum`."""


def _cycling(*, values: list[float], period: Period | None = None) -> None:
    """Go round a list."""


_ALGORITHMS: Final[dict[str, Callable[..., None]]] = {
    "static": _static,
    "gmp": _gmp,
    "set": _set,
    "rigl": _rigl,
    "group": _group,
}
_CURVES: Final[dict[str, Callable[..., None]]] = {
    "constant": _constant,
    "linear": _linear,
    "exp": _exp,
    "power": _power,
    "cosine": _cosine,
    "cycling": _cycling,
}


def check_sparsity(place: Place, problems: Problems) -> None:
    """Check the section, and note that it has no effect yet.

    Args:
        place: A fraction, a mapping, or a list of mappings.
        problems: What is wrong is added here.
    """
    num_before = problems.num_added
    _check(place, problems)
    if problems.num_added == num_before:
        problems.note(
            place.key_at,
            place.path,
            "is right, but sparse training is not part of this version: ALL WEIGHTS ARE TRAINED.",
        )


def _check(place: Place, problems: Problems) -> None:
    if isinstance(place.node, Sequence):
        for item in place.items():
            _check_one(item, problems)
    elif isinstance(place.node, Mapping):
        _check_one(place, problems)
    else:
        check_plain(place, Fraction, problems)


def _check_one(place: Place, problems: Problems) -> None:
    algorithm = _choice(place, "algorithm", _ALGORITHMS, problems, default="static")
    if algorithm is None:
        return
    schema = schema_of(algorithm, owner=f"{algorithm.__name__[1:]} sparsity")
    check_arguments(place, schema, problems, ignored=("algorithm",))
    given = [key for key in ("sparsity", "schedule") if not is_null(_node(place, key))]
    if len(given) == 2:
        what = "sparsity and schedule are both given; they exclude each other."
        problems.add(place.key_at, place.path, what)
    elif not given and algorithm is not _group and algorithm is not _static:
        path = place.path_of("sparsity")
        problems.add(place.key_at, path, "missing; write sparsity or schedule.")
    for key in ("sparsity", "schedule", "drop_fraction"):
        curve = place.key(key)
        if curve is not None and isinstance(curve.node, Mapping):
            _check_curve(curve, problems)
    _check_update(place.key("update"), problems)
    groups = place.key("groups")
    if groups is not None:
        for item in groups.items():
            _check_one(item, problems)


def _check_curve(place: Place, problems: Problems) -> None:
    curve = _choice(place, "type", _CURVES, problems)
    if curve is not None:
        schema = schema_of(curve, owner=f"a curve of type {curve.__name__[1:]}")
        check_arguments(place, schema, problems, ignored=("type",))


def _check_update(place: Place | None, problems: Problems) -> None:
    if place is not None and isinstance(place.node, Mapping):
        form = _update_every if is_null(_node(place, "steps")) else _update_at
        check_arguments(place, schema_of(form, owner="update"), problems)


def _choice(
    place: Place,
    key: str,
    table: dict[str, Callable[..., None]],
    problems: Problems,
    default: str | None = None,
) -> Callable[..., None] | None:
    """Return what a key names; None with a problem added if it names nothing."""
    if not isinstance(place.node, Mapping):
        what = f"{describe(place.node)} does not fit; expected a mapping with {key}."
        problems.add(place.node.at, place.path, what)
        return None
    inner = place.key(key)
    if inner is None and default is not None:
        return table[default]
    if inner is None:
        add_lack(place, key, f"known: {', '.join(table)}", problems, problems.add)
        return None
    name = check_plain(inner, str, problems)
    if not isinstance(name, str):
        return None
    if name.lower() not in table:
        what = f"{name!r} is not known. {suggest(name, table)}"
        problems.add(inner.node.at, inner.path, what)
    return table.get(name.lower())


def _node(place: Place, key: str) -> Node | None:
    return place.node.get(key) if isinstance(place.node, Mapping) else None
