"""Communication with other processes: the contract, with a run of one process as default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

ReduceOp = Literal["sum", "mean", "max"]


class Comm:
    """This process among those of the run; as it is, for a run of one process.

    Collective methods are called by all processes, in the same order. Those that say nothing are
    not collective, and wait neither for other processes nor for the device.
    """

    rank: int = 0
    """The number of this process among all."""
    local_rank: int = 0
    """The number of this process among those of its host."""
    world_size: int = 1
    """The number of processes."""
    data_shard: tuple[int, int] = (0, 1)
    """Which part of the data this process reads, and of how many."""

    def __init__(self) -> None:
        self._topics: list[str] = []

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def process_group(self) -> Any:
        """The group that moves host memory, for checkpoints; None = this process is alone."""
        return None

    # ---- tensors

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combine a tensor over the processes that have different data. Collective."""
        return tensor

    def is_sharded(self, tensor: Tensor) -> bool:
        """Return whether this process has only a part of a tensor."""
        return False

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return what of a tensor this process has."""
        return tensor

    def broadcast_buffers(self, model: Module) -> None:
        """Give all processes the main one's buffers, as far as they have others. Collective."""

    # ---- values on the host

    def any_true(self, flag: bool) -> bool:
        """Return whether any process says True; without the device. Collective."""
        return flag

    def gather_from_shards(self, value: int) -> list[int]:
        """Return the numbers of all data shards, in their order; without the device. Collective."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's value. Collective.

        Args:
            value: None, bool, int, float, str, bytes, Path, tensors, NumPy arrays; lists, tuples
                and dicts of these. No pickle is sent. Tensors wait for the device.

        Raises:
            BackendError: If there are other processes, and something else is in it.
        """
        return value

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order. Collective.

        Args:
            value: As in `broadcast_object`.

        Raises:
            BackendError: As there.
        """
        return [value]

    # ---- meeting

    def barrier(self, name: str) -> None:
        """Wait until every process is here; not for the device. Collective."""

    def try_barrier(self, name: str) -> bool:
        """Return whether all processes come to this barrier within a short time.

        Unlike `barrier`, it does not wait for those that do something else.

        Args:
            name: Of the barrier, without spaces.
        """
        return True

    # ---- consensus

    def propose(self, topic: str) -> None:
        """Have `decided` return a topic on all processes at the same decision point.

        Safe in a signal handler.

        Args:
            topic: What `decided` is to return.
        """
        self._topics.append(topic)

    def decided(self) -> Sequence[str]:
        """Return the topics that all processes begin at this decision point.

        Decision points are the calls of this method: every process has the same. No message is
        sent for it, and none awaited unless there is a topic.
        """
        topics, self._topics = self._topics, []
        return topics
