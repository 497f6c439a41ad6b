"""Context parallelism: the positions of each row of a batch are split over ranks.

A model that supports it has a method `split_rows(parallel: ContextParallel)`, which the backend
calls once, before the model is distributed. From then on, all ranks along `context` call the model
with the same batch, and the model

* takes its own positions of whatever has a dimension for positions (`take`),
* gathers what positions need of each other, such as keys and values (`gather`),
* sums over ranks what is a sum over positions, such as the loss (`total`),

so that its loss is the same on all ranks: the loss of the whole batch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # shapes of collectives, for fake tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from typing_extensions import override

from ..errors import BackendError, UnsplittableBatch

_COLLECTIVES: Any = torch.ops._c10d_functional  # undeclared in torch


class ContextParallel:
    """One of several ranks that split the positions of each row.

    A row of T positions is cut into twice as many chunks as there are ranks. Rank c has the chunks
    c and 2 * size - 1 - c: with a causal mask, all ranks have equally many pairs of queries and
    keys. The order of a rank's own positions is their order in the row.

    Has no tensors and no handles of the system, so that it can be copied with a model.

    Args:
        rank: This rank along `context`.
        size: The number of ranks along `context`.
        group_name: The name of their process group.
    """

    def __init__(self, rank: int, size: int, group_name: str) -> None:
        self.rank = rank
        self.size = size
        self._group_name = group_name

    def chunks(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first position and the end of each of this rank's two chunks of a row.

        Raises:
            UnsplittableBatch: If rows of this length cannot be split evenly.
        """
        num = 2 * self.size
        if length % num or length == 0:
            near = max(length // num, 1) * num
            raise UnsplittableBatch(
                f"backend.parallel.context is {self.size}, but a row has {length} positions, which "
                f"must be a multiple of {num} (twice the number of processes). Change "
                f"max_sequence_length of the data, for example to {near}, or "
                f"backend.parallel.context."
            )
        size = length // num
        early, late = self.rank * size, (num - 1 - self.rank) * size
        return (early, early + size), (late, late + size)

    def take(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's own positions of a tensor that every rank has.

        Raises:
            UnsplittableBatch: If rows of this length cannot be split evenly.
        """
        parts = [
            tensor.narrow(dim, start, end - start) for start, end in self.chunks(tensor.shape[dim])
        ]
        return torch.cat(parts, dim)

    def gather(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return all positions, in their order in the row, from each rank's own. Collective.

        The gradient is the sum of all ranks' gradients of these positions.
        """
        gathered = cast(Tensor, _Gather.apply(tensor, self.size, self._group_name))  # type: ignore[no-untyped-call]
        half = tensor.shape[dim] // 2
        ranks = gathered.chunk(self.size)
        early = [one.narrow(dim, 0, half) for one in ranks]
        late = [one.narrow(dim, half, half) for one in reversed(ranks)]
        return torch.cat(early + late, dim)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over ranks. Collective.

        Each rank computes the same from the sum, so its gradient is multiplied by `size`: gradients
        of parameters are averaged over ranks later.
        """
        return cast(Tensor, _Total.apply(value, self.size, self._group_name))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Concatenate a tensor of all ranks along the first dimension."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, size: int, group_name: str) -> Tensor:
        ctx.size, ctx.group_name = size, group_name
        found = _COLLECTIVES.all_gather_into_tensor(tensor.contiguous(), size, group_name)
        return cast(Tensor, _COLLECTIVES.wait_tensor(found))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        found = _COLLECTIVES.reduce_scatter_tensor(
            grads[0].contiguous(), "sum", ctx.size, ctx.group_name
        )
        return _COLLECTIVES.wait_tensor(found), None, None


class _Total(torch.autograd.Function):
    """Sum a tensor over ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, size: int, group_name: str) -> Tensor:
        ctx.size = size
        found = _COLLECTIVES.all_reduce(tensor.contiguous(), "sum", group_name)
        return cast(Tensor, _COLLECTIVES.wait_tensor(found))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.size, None, None


def split_rows(model: Module, mesh: DeviceMesh) -> None:
    """Let a model split the rows of its batches over the mesh's axis "context".

    Raises:
        BackendError: If the model does not support it.
    """
    group = mesh.get_group("context")
    size = group.size()
    split = getattr(model, "split_rows", None)
    if not callable(split):
        raise BackendError(
            f"backend.parallel.context is {size}, but {type(model).__name__} does not support "
            f"context parallelism: it has no method split_rows. Use one of the decoders of the "
            f"package, such as gpt2 or llama, or backend.parallel.shard or tensor."
        )
    split(ContextParallel(mesh.get_local_rank("context"), size, group.group_name))
