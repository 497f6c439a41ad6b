"""Sparsity algorithms from configuration values; several for different parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from annotated_types import MinLen

from modelzoo_trainer.base.constraints import Fraction, check, checked
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.optim.sparsity.algorithm import SparsityAlgorithm
from modelzoo_trainer.optim.sparsity.curves import make
from modelzoo_trainer.optim.sparsity.dynamic import SET, RigL
from modelzoo_trainer.optim.sparsity.static import GMP, Static


class Group:
    """Apply different algorithms to different sets of parameters.

    Args:
        groups: The algorithms, each with its `param_filter`; no parameter may match two.

    Raises:
        ConfigError: If the list is empty, or an item is not an algorithm.
    """

    @checked()
    def __init__(self, groups: Annotated[list[Any], MinLen(1), "a list of algorithms"]) -> None:
        for idx, group in enumerate(groups):
            if not isinstance(group, (SparsityAlgorithm, Group)):
                raise ConfigError(
                    f"Group.groups[{idx}] is {group!r}, which is not an algorithm. Pass instances, "
                    f"such as Static(0.5)."
                )
        self._groups = list(groups)

    def leaves(self) -> list[SparsityAlgorithm]:
        """Return the algorithms that apply to parameters themselves."""
        return [leaf for group in self._groups for leaf in group.leaves()]


ALGORITHMS: Final[dict[str, type[SparsityAlgorithm] | type[Group]]] = {
    "static": Static,
    "gmp": GMP,
    "set": SET,
    "rigl": RigL,
    "group": Group,
}


def algorithms_of(given: Any) -> list[SparsityAlgorithm]:
    """Return the algorithms for a trainer's argument `sparsity`.

    Args:
        given: A fraction, for static sparsity; a mapping as in a configuration file, with
            `algorithm` and its arguments; a list of mappings; an algorithm; a callable that returns
            any of these; or None.

    Raises:
        ConfigError: If it is none of these.
    """
    if callable(given):
        given = given()
    return [] if given is None else _algorithm_of(given, "sparsity").leaves()


def _algorithm_of(given: Any, where: str) -> SparsityAlgorithm | Group:
    if isinstance(given, (SparsityAlgorithm, Group)):
        return given
    if isinstance(given, (list, tuple)):
        return Group([_algorithm_of(one, f"{where}[{idx}]") for idx, one in enumerate(given)])
    if not isinstance(given, Mapping):
        check(where, given, Fraction)
        return Static(given)
    arguments = {key: value for key, value in given.items() if key != "algorithm"}
    kind = given.get("algorithm", "static")
    if not isinstance(kind, str) or kind.lower() not in ALGORITHMS:
        raise ConfigError(f"{where}.algorithm is {kind!r}. {suggest(str(kind), ALGORITHMS)}")
    if kind.lower() == "group" and isinstance(arguments.get("groups"), (list, tuple)):
        return _algorithm_of(arguments["groups"], f"{where}.groups")
    made: SparsityAlgorithm | Group = make(ALGORITHMS[kind.lower()], arguments, where)
    return made
