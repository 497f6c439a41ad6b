"""Several algorithms, each for parameters of its own."""

from __future__ import annotations

from typing import Any

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.sparsity.algorithm import SparsityAlgorithm


class Group:
    """Has an algorithm for each of several sets of parameters.

    Args:
        groups: The algorithms, each with its `param_filter`; no parameter may have two.

    Raises:
        ConfigError: If there is none, or one is no algorithm.
    """

    def __init__(self, groups: list[Any]) -> None:
        if not isinstance(groups, (list, tuple)) or not groups:
            raise ConfigError(f"Group.groups is {groups!r}; it must be a list of algorithms.")
        for idx, group in enumerate(groups):
            if not isinstance(group, (SparsityAlgorithm, Group)):
                raise ConfigError(f"Group.groups[{idx}] is {group!r}, which is no algorithm.")
        self._groups = list(groups)

    def leaves(self) -> list[SparsityAlgorithm]:
        """Return the algorithms that have parameters of their own."""
        return [leaf for group in self._groups for leaf in group.leaves()]
