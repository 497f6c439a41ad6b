"""Communication between ranks: the interface, with a single process as default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

ReduceOp = Literal["sum", "mean", "max"]


class Comm:
    """This rank and communication with the others; the base class is for a single process.

    Collective methods are called by all ranks, in the same order. Other methods wait neither for
    other ranks nor for the device.
    """

    rank: int = 0
    """Global rank of this process."""
    local_rank: int = 0
    """Rank of this process on its host."""
    world_size: int = 1
    """The number of processes."""
    data_shard: tuple[int, int] = (0, 1)
    """(index of the data shard of this rank, number of shards)."""

    def __init__(self) -> None:
        self._topics: list[str] = []

    @property
    def is_main(self) -> bool:
        """Whether this is the main process (rank 0)."""
        return self.rank == 0

    @property
    def seed_place(self) -> int:
        """The number by which random numbers of steps differ between ranks.

        Ranks with the same data and the same positions of its rows have the same number.
        """
        return self.data_shard[0]

    @property
    def process_group(self) -> Any:
        """The process group for host memory, for checkpoints; None = single process."""
        return None

    def new_process_group(self) -> Any:
        """Return another process group for host memory; None = single process. Collective."""
        return None

    # ---- tensors

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over ranks with different data. Collective."""
        return tensor

    def is_sharded(self, tensor: Tensor) -> bool:
        """Return whether this rank holds only a shard of a tensor."""
        return False

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the full tensor. Collective where this rank holds only a shard of it."""
        return tensor

    def part_like(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a tensor that every rank has, as it holds one of another.

        `like`: of the same shape.
        """
        return tensor

    def broadcast_buffers(self, model: Module) -> None:
        """Copy the main process's buffers to all ranks, where they may differ. Collective."""

    # ---- values on the host

    def any_true(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank, without using the device. Collective."""
        return flag

    def gather_from_shards(self, value: int) -> list[int]:
        """Return the numbers of all data shards, in order, without using the device. Collective."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's value. Collective.

        Args:
            value: None, bool, int, float, str, bytes, Path, tensors, NumPy arrays; lists, tuples
                and dicts of these. Nothing is pickled. Tensors wait for the device.

        Raises:
            BackendError: If there are other ranks, and the value contains another type.
        """
        return value

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. Collective.

        Args:
            value: As in `broadcast_object`.

        Raises:
            BackendError: As for `broadcast_object`.
        """
        return [value]

    # ---- barriers

    def barrier(self, name: str) -> None:
        """Wait until every rank is here; does not wait for the device. Collective."""

    def try_barrier(self, name: str) -> bool:
        """Return whether all ranks reach this barrier within a short time.

        Unlike `barrier`, does not wait for ranks that are doing something else.

        Args:
            name: Name of the barrier, without spaces.
        """
        return True

    # ---- consensus

    def propose(self, topic: str) -> None:
        """Make `decided` return a topic on all ranks at the same decision point.

        Safe in a signal handler.

        Args:
            topic: What `decided` shall return.
        """
        self._topics.append(topic)

    def decided(self) -> Sequence[str]:
        """Return the topics that all ranks act on at this decision point.

        Each call of this method is a decision point: every rank must make the same calls. Sends
        nothing, and only waits if there is a topic.
        """
        topics, self._topics = self._topics, []
        return topics


class Exchange:
    """A value of each rank that rarely changes; it is sent again only after a change on any rank.

    Raises:
        BackendError: As for `Comm.broadcast_object`.
    """

    def __init__(self) -> None:
        self._own: Any = None
        self._all: list[Any] | None = None

    def gather(self, comm: Comm, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. Collective.

        Args:
            comm: Communication between the ranks; always the same.
            value: As in `Comm.broadcast_object`; compared with the value of the previous call.

        Cost: One bit between hosts while nothing changes, without using the device.
        """
        is_new = self._all is None or value != self._own
        if comm.any_true(is_new) or self._all is None:
            self._own, self._all = value, comm.gather_object(value)
        return self._all
