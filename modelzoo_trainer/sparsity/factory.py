"""Algorithms from what a user may write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.sparsity.algorithm import SparsityAlgorithm
from modelzoo_trainer.sparsity.curves import as_fraction, make
from modelzoo_trainer.sparsity.gmp import GMP
from modelzoo_trainer.sparsity.group import Group
from modelzoo_trainer.sparsity.rigl import RigL
from modelzoo_trainer.sparsity.set import SET
from modelzoo_trainer.sparsity.static import Static

ALGORITHMS: Final[dict[str, type[SparsityAlgorithm] | type[Group]]] = {
    "static": Static,
    "gmp": GMP,
    "set": SET,
    "rigl": RigL,
    "group": Group,
}


def algorithms_of(given: Any) -> list[SparsityAlgorithm]:
    """Return the algorithms that a trainer's argument `sparsity` means.

    Args:
        given: A fraction, which is static; a mapping as in a configuration file, with `algorithm`
            and its arguments; a list of such; an algorithm; a callable that returns any of these;
            or None.

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
        return Static(as_fraction(given, where))
    arguments = {key: value for key, value in given.items() if key != "algorithm"}
    kind = given.get("algorithm", "static")
    if not isinstance(kind, str) or kind.lower() not in ALGORITHMS:
        raise ConfigError(f"{where}.algorithm is {kind!r}. {suggest(str(kind), ALGORITHMS)}")
    if kind.lower() == "group" and isinstance(arguments.get("groups"), (list, tuple)):
        return _algorithm_of(arguments["groups"], f"{where}.groups")
    made: SparsityAlgorithm | Group = make(ALGORITHMS[kind.lower()], arguments, where)
    return made
