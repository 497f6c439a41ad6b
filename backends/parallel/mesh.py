"""How many processes there are along each axis of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from ..errors import BackendError

AXES: Final = ("replicate", "shard", "tensor")
REST: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The number of processes along each axis; their product is the number of processes.

    Args:
        replicate: Copies of the model, each with data of its own.
        shard: Processes that share one copy's parameters and optimizer state, each with data of
            its own.
        tensor: Processes that share the arithmetic of one layer, on the same data.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def num_data_shards(self) -> int:
        """The number of processes with data of their own."""
        return self.replicate * self.shard


def fit_sizes(asked: Mapping[str, int], world_size: int) -> Sizes:
    """Return the sizes that were asked for, with the rest filled in.

    Args:
        asked: Axis to its size; at most one is -1 = the rest.
        world_size: The number of processes.

    Raises:
        BackendError: If the sizes do not multiply to the number of processes.
    """
    fixed = prod(size for size in asked.values() if size != REST)
    rest, left_over = divmod(world_size, fixed)
    has_rest = REST in asked.values()
    if left_over or (not has_rest and rest != 1):
        given = ", ".join(f"{axis}: {size}" for axis, size in asked.items())
        fits = "a multiple of " if has_rest else ""
        raise BackendError(
            f"backend.parallel is {{{given}}}, which fits {fits}{fixed} processes, but there are "
            f"{world_size}. Start another number of processes, or set one axis to -1 (the rest) "
            f"and the others so that their product divides {world_size}."
        )
    return Sizes(**{axis: rest if size == REST else size for axis, size in asked.items()})
