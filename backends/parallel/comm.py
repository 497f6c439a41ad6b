"""Communication between ranks, over torch.distributed and the rendezvous store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from typing_extensions import override

from ..comm import Comm, ReduceOp
from ..coordination.world import World
from ..errors import BackendError
from .config import Sizes
from .fsdp import distribute, is_sharded, own_part, whole

_OPERATIONS: Final = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class DistributedComm(Comm):
    """Communication of one of several ranks; connected when the backend is opened."""

    def __init__(self) -> None:
        super().__init__()
        self._world: World | None = None
        self._seed_place = 0
        self.has_stepped = False
        """Whether an optimizer step has finished, and with it one-time work such as compilation."""

    @property
    def world(self) -> World:
        """All ranks of the run.

        Raises:
            BackendError: Before `connect`.
        """
        if self._world is None:
            raise BackendError(
                "The backend is not initialized yet, so there is no process group. Use it in the "
                "hook setup() or later."
            )
        return self._world

    @property
    def is_connected(self) -> bool:
        """Whether `connect` was called."""
        return self._world is not None

    def connect(self, world: World) -> None:
        """Set the ranks of the run."""
        self._world = world
        self.rank, self.local_rank = world.rank, world.local_rank
        self.world_size = world.world_size

    def divide(self, sizes: Sizes, mesh: DeviceMesh, rows: DeviceMesh | None = None) -> None:
        """Set the data shards: ranks along `context` and `tensor` share one. Collective.

        `mesh`, `rows`: as of `make_mesh` and `make_mesh_of_rows`.
        """
        own = sizes.of_parameters
        self._has_shards = own.shard * own.tensor > 1
        self._sharing = sizes.ranks_per_data_shard
        self.data_shard = (self.rank // self._sharing, sizes.num_data_shards)
        place_in_row = self.rank // sizes.tensor % sizes.context
        self._seed_place = self.data_shard[0] + place_in_row * sizes.num_data_shards
        self._groups = [one.get_group(axis) for one in (mesh, rows) if one for axis in _axes(one)]
        self._data_group = dist.group.WORLD
        if rows is not None:
            self._data_group = rows.get_group("data")
        elif sizes.tensor > 1:
            self._data_group = mesh["replicate", "shard"]._flatten("data").get_group()

    @property
    @override
    def seed_place(self) -> int:
        return self._seed_place

    @property
    @override
    def process_group(self) -> Any:
        return self.world.checkpoint_group

    @override
    def new_process_group(self) -> Any:
        return self.world.new_group()

    # ---- tensors

    @override
    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, _OPERATIONS[op], group=self._data_group)
        return found / self.data_shard[1] if op == "mean" else found

    @override
    def is_sharded(self, tensor: Tensor) -> bool:
        return is_sharded(tensor)

    @override
    def local_part(self, tensor: Tensor) -> Tensor:
        return own_part(tensor)

    @override
    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    @override
    def part_like(self, tensor: Tensor, like: Tensor) -> Tensor:
        return own_part(distribute(tensor, like)) if is_sharded(like) else tensor

    @override
    def broadcast_buffers(self, model: Module) -> None:
        if self._has_shards:  # DDP does this in each forward pass
            for buffer in model.buffers():
                if not is_sharded(buffer):
                    dist.broadcast(buffer, 0)

    # ---- values on the host

    @override
    def any_true(self, flag: bool) -> bool:
        return self.world.any_true(flag)

    @override
    def gather_from_shards(self, value: int) -> list[int]:
        found = self.world.gather_object(value)
        return found[:: self._sharing]

    @override
    def broadcast_object(self, value: Any) -> Any:
        return self.world.broadcast_object(value)

    @override
    def gather_object(self, value: Any) -> list[Any]:
        return self.world.gather_object(value)

    # ---- barriers

    @override
    def barrier(self, name: str) -> None:
        self.world.barrier()

    @override
    def try_barrier(self, name: str) -> bool:
        return self.world.try_barrier(name)

    # ---- consensus

    @override
    def propose(self, topic: str) -> None:
        self.world.coordinator.propose(topic)

    @override
    def decided(self) -> Sequence[str]:
        if not self.has_stepped:  # one-time work may be left
            return self.world.coordinator.decided()
        groups = [*self._groups, *([] if self._data_group is None else [self._data_group])]
        self.world.shorten_timeouts(groups)
        self.decided = self.world.coordinator.decided  # type: ignore[method-assign]  # from now on
        return self.decided()


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()
