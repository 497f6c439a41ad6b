"""Check the `sparsity` section and return its algorithms."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as MappingOf
from typing import Any, Final

from modelzoo_trainer.base.constraints import Fraction
from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.components import Component, add_lack, check_plain
from modelzoo_trainer.config.positions import (
    Mapping,
    Node,
    Place,
    Problems,
    Sequence,
    describe,
    is_null,
)
from modelzoo_trainer.errors import ConfigError, suggest

_CURVED: Final = ("sparsity", "schedule", "drop_fraction")  # numbers, or curves of the step


def check_sparsity(place: Place, problems: Problems) -> Component | None:
    """Return the algorithm of the section; None with problems added if it is invalid."""
    # Imported here because it imports torch, which a file without the section does not need.
    from modelzoo_trainer.optim.sparsity import Group, Static

    if isinstance(place.node, Mapping):
        return _check_one(place, problems)
    num_before = problems.num_added
    if isinstance(place.node, Sequence):
        groups = [_check_one(item, problems) for item in place.items()]
        component = Component(Group, {"groups": groups}, place.key_at, place.path)
    else:
        fraction = check_plain(place, Fraction, problems)
        component = Component(Static, {"sparsity": fraction}, place.key_at, place.path)
    return _tried(component, problems, num_before)


def _check_one(place: Place, problems: Problems) -> Component | None:
    from modelzoo_trainer.optim.sparsity import ALGORITHMS, Group, Static

    num_before = problems.num_added
    found = _choice(place, "algorithm", ALGORITHMS, problems, default="static")
    if found is None:
        return None
    name, target = found
    schema = schema_of(target, owner=f"{name} sparsity")
    nested = {"groups": _check_groups}
    arguments = check_arguments(place, schema, problems, nested=nested, ignored=("algorithm",))
    given = [key for key in ("sparsity", "schedule") if not is_null(_node(place, key))]
    if len(given) == 2:
        what = "sparsity and schedule are both given. Remove one of them."
        problems.add(place.key_at, place.path, what)
    elif not given and target not in (Group, Static):
        path = place.path_of("sparsity")
        problems.add(place.key_at, path, "missing; write sparsity or schedule.")
    for key in _CURVED:
        curve = place.key(key)
        if curve is not None and isinstance(curve.node, Mapping):
            _check_curve(curve, problems)
    _check_update(place.key("update"), problems)
    return _tried(Component(target, arguments, place.key_at, place.path), problems, num_before)


def _tried(component: Component, problems: Problems, num_before: int) -> Component | None:
    """Return an algorithm that accepts its arguments; None if there were problems."""
    if problems.num_added == num_before:
        try:
            component.make()
        except ConfigError as error:
            problems.add(component.at, "", component.explain(error))
    return component if problems.num_added == num_before else None


def _check_groups(place: Place, problems: Problems) -> list[Component | None]:
    if not isinstance(place.node, Sequence):
        what = f"expected a list of mappings, got {describe(place.node)}."
        problems.add(place.node.at, place.path, what)
    return [_check_one(item, problems) for item in place.items()]


def _check_curve(place: Place, problems: Problems) -> None:
    from modelzoo_trainer.optim.sparsity import CURVES

    found = _choice(place, "type", CURVES, problems)
    if found is not None:
        name, curve = found
        schema = schema_of(curve, owner=f"a curve of type {name}")
        check_arguments(place, schema, problems, ignored=("type",))


def _check_update(place: Place | None, problems: Problems) -> None:
    from modelzoo_trainer.optim.sparsity import UpdateAt, UpdateEvery

    if place is not None and isinstance(place.node, Mapping):
        form: Callable[..., Any] = UpdateEvery if is_null(_node(place, "steps")) else UpdateAt
        check_arguments(place, schema_of(form, owner="update"), problems)


def _choice(
    place: Place,
    key: str,
    table: MappingOf[str, Callable[..., Any]],
    problems: Problems,
    default: str | None = None,
) -> tuple[str, Callable[..., Any]] | None:
    """Return what a key names, with the name; None with a problem added if it names nothing."""
    if not isinstance(place.node, Mapping):
        what = f"expected a mapping with {key}, got {describe(place.node)}."
        problems.add(place.node.at, place.path, what)
        return None
    inner = place.key(key)
    if inner is None and default is not None:
        return default, table[default]
    if inner is None:
        add_lack(place, key, f"known: {', '.join(table)}", problems)
        return None
    name = check_plain(inner, str, problems)
    if not isinstance(name, str):
        return None
    if name.lower() not in table:
        what = f"{name!r} is not known. {suggest(name, table)}"
        problems.add(inner.node.at, inner.path, what)
        return None
    return name.lower(), table[name.lower()]


def _node(place: Place, key: str) -> Node | None:
    return place.node.get(key) if isinstance(place.node, Mapping) else None
