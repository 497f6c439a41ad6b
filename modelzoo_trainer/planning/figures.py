"""What a run on paper finds out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from modelzoo_trainer.planning.memory_tracker import Exchange, Peak, local


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A run on paper, of one of its processes.

    Args:
        world_size: Processes.
        axes: Sizes of their mesh, by name.
        device: What the file asks for.
        num_data_shards: How many of them have different data.
        batch_size: Samples of a batch of one process.
        num_batches: Batches of an optimizer step, micro-batches counted.
        num_params: Of the whole model; shared ones count once.
        num_params_here: Of this process.
        building: Memory while the model and its optimizer are built.
        training: Memory during the steps.
        exchanges: What a step sends, by kind of collective and size of the group.
        flops: Floating-point operations of a step on this process; a product with a sum is two.
        num_host_reads: Values that a step reads on the host.
        checkpoint_bytes: Of a checkpoint's tensors.
        checkpoint_bytes_here: About how many of them this process writes.
    """

    world_size: int
    axes: dict[str, int]
    device: str
    num_data_shards: int
    batch_size: int
    num_batches: int
    num_params: int
    num_params_here: int
    building: Peak
    training: Peak
    exchanges: dict[tuple[str, int], Exchange]
    flops: int
    num_host_reads: int
    checkpoint_bytes: int
    checkpoint_bytes_here: int

    @property
    def peak_bytes(self) -> int:
        """The most memory that a process takes at a time."""
        return max(self.building.total, self.training.total)


def sizes_of(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Return how many elements tensors have in all, and how many of them are here."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    return sum(one.numel() for one in unique), sum(local(one).numel() for one in unique)


def checkpoint_sizes(trees: Iterable[Any], world_size: int) -> tuple[int, int]:
    """Return the bytes of all tensors in state dicts, and about how many this process writes.

    Args:
        trees: State dicts.
        world_size: Processes, over which what all of them have is spread.
    """
    tensors = {id(leaf): leaf for leaf in tree_leaves(list(trees)) if isinstance(leaf, Tensor)}
    unique = {_place(one): one for one in tensors.values()}.values()
    total = sum(one.numel() * one.element_size() for one in unique)
    return total, round(sum(local(one).nbytes / _num_copies(one, world_size) for one in unique))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset(), part.numel()


def _num_copies(tensor: Tensor, world_size: int) -> int:
    """Return how many processes have the same part of a tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return world_size
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # it is a sharded one
    num_parts: int = prod(
        int(mesh.size(dim)) for dim, placement in enumerate(placements) if placement.is_shard()
    )
    return max(1, world_size // num_parts)
