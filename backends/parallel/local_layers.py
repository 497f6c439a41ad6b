"""Layers that compute with the plain tensors of this rank, and the exchange of positions.

Dimension letters: B batch, T positions, H hidden size, N ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import Module, Parameter, RMSNorm, functional

GATHERED: Final = "_gathered_states"  # attribute of gathered states: `GatheredStates`
_POSITIONS: Final = 1  # the dimension
_SENT: Final[Any] = torch.ops._c10d_functional


class PositionGroup(NamedTuple):
    """The ranks that share the positions of a batch."""

    name: str
    num: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> PositionGroup:
        """Return the group of a mesh with one dimension."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def all_positions(states: Tensor, group: PositionGroup) -> Tensor:
    """Gather the positions of all ranks, (B, T / N, H) to (B, T, H)."""
    gathered = _SENT.all_gather_into_tensor(states.contiguous(), group.num, group.name)
    parts = _SENT.wait_tensor(gathered).unflatten(0, (group.num, -1))
    whole: Tensor = parts.transpose(0, 1).flatten(1, 2)  # no copy if B is 1
    return whole


def sum_of_own(states: Tensor, group: PositionGroup) -> Tensor:
    """Return the sum over ranks at this rank's positions, (B, T, H) to (B, T / N, H)."""
    parts = states.reshape(len(states), group.num, -1, *states.shape[2:]).transpose(0, 1)
    sent = parts.contiguous().flatten(0, 1)
    reduced = _SENT.reduce_scatter_tensor(sent, "sum", group.num, group.name)
    own: Tensor = _SENT.wait_tensor(reduced)
    return own


def own_positions(states: Tensor, group: PositionGroup) -> Tensor:
    """Return a copy of this rank's positions, (B, T, H) to (B, T / N, H)."""
    return states.chunk(group.num, _POSITIONS)[group.rank].clone()


_Exchange = Callable[[Tensor, PositionGroup], Tensor]


class _Exchanged(Function):
    """An exchange of positions, and the one of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, group: PositionGroup, there: _Exchange, back: _Exchange
    ) -> Any:
        ctx.group, ctx.back = group, back
        return there(states, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group), None, None, None


class GatheredStates:
    """What the layers that have the same gathered states as inputs share for the backward pass.

    They keep this rank's positions, and gather again once for the gradients of all their weights.
    """

    def __init__(self, own: Tensor, group: PositionGroup) -> None:
        self.own = own
        self.again = _Again(group)


class _Again:
    """Gathers states again, once for all users."""

    def __init__(self, group: PositionGroup) -> None:
        self.group = group
        self.num_users = 0
        self._num_served = 0
        self._whole: Tensor | None = None

    def take(self, own: Tensor) -> Tensor:
        """Return all positions for the next user."""
        if self._whole is None:
            self._whole = all_positions(own, self.group)
        whole = self._whole
        self._num_served += 1
        if self._num_served == self.num_users:
            self._num_served, self._whole = 0, None
        return whole


class _LinearOfGathered(Function):
    """A Linear of gathered states that keeps this rank's positions only.

    As with autocast, gradients are computed in the dtype of the outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, own: Tensor, again: _Again, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.again = again
        again.num_users += 1
        return functional.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        own, weight = ctx.saved_tensors
        whole = ctx.again.take(own.to(grad.dtype)).flatten(0, -2)
        flat = grad.flatten(0, -2)
        of_states = grad @ weight.to(grad.dtype)
        of_weight = (flat.t() @ whole).to(weight.dtype)
        of_bias = flat.sum(0).to(weight.dtype) if ctx.needs_input_grad[4] else None
        return of_states.to(own.dtype), None, None, of_weight, of_bias


def exchange(states: Tensor, group: PositionGroup, there: _Exchange, back: _Exchange) -> Tensor:
    """Return `there(states)`; the gradient is `back(gradient)`."""
    found: Tensor = _Exchanged.apply(states, group, there, back)  # type: ignore[no-untyped-call]
    return found


class LocalLinear(ParallelStyle):
    """A Linear that is split, with plain tensors as inputs and outputs.

    colwise: inputs are whole; their gradients are from this rank's outputs alone.
    rowwise: outputs are the sum over ranks, at this rank's positions where positions are split.
    """

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        is_rowwise = self.style == "rowwise"
        cuts: dict[str, Placement] = {
            "weight": Shard(1 if is_rowwise else 0),
            "bias": Replicate() if is_rowwise else Shard(0),
        }
        for name, param in list(module._parameters.items()):
            if param is not None:
                part = distribute_tensor(
                    param.detach(), device_mesh, [cuts[name]], src_data_rank=None
                )
                module._parameters[name] = Parameter(part, requires_grad=param.requires_grad)
        forward = partial(_rowwise, PositionGroup.of(device_mesh)) if is_rowwise else _colwise
        module.forward = partial(forward, module)
        return module


def is_split() -> bool:
    """Return whether states between layers are split by positions: in training alone.

    Without gradients nothing is kept for the backward pass, and the number of positions need not
    be divisible: a new token is alone.
    """
    return torch.is_grad_enabled()


def _colwise(layer: Any, states: Tensor) -> Tensor:
    weight, bias = layer.weight.to_local(), None if layer.bias is None else layer.bias.to_local()
    gathered = getattr(states, GATHERED, None)
    if gathered is None or not weight.requires_grad:
        return functional.linear(states, weight, bias)
    found: Tensor = _LinearOfGathered.apply(states, gathered.own, gathered.again, weight, bias)  # type: ignore[no-untyped-call]
    return found


def _rowwise(group: PositionGroup, layer: Any, states: Tensor) -> Tensor:
    partial_sum = functional.linear(states, layer.weight.to_local())
    if is_split():
        output = exchange(partial_sum, group, sum_of_own, all_positions)
    else:
        output = _SENT.wait_tensor(_SENT.all_reduce(partial_sum, "sum", group.name))
    bias = with_summed_gradients(layer.bias)
    return output if bias is None else output + bias.to(output.dtype)


def norm_own_part(norm: Any, states: Tensor) -> Tensor:
    """Normalize states that are split over the ranks."""
    weight = with_summed_gradients(norm.weight)
    if isinstance(norm, RMSNorm):
        return functional.rms_norm(states, norm.normalized_shape, weight, norm.eps)
    bias = with_summed_gradients(norm.bias)
    return functional.layer_norm(states, norm.normalized_shape, weight, bias, norm.eps)


def with_summed_gradients(param: Tensor | None) -> Tensor | None:
    """Return the plain tensor of a replicated parameter; the gradients of all ranks are summed."""
    if not isinstance(param, DTensor):
        return param
    # Without the first step, each user of the gradient would sum it anew.
    whole = param.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def drop_own_positions(group: PositionGroup, dropout: Any, states: Tensor) -> Tensor:
    """Apply dropout to this rank's positions.

    Draws the random numbers of all positions, so that results and later random numbers are the same
    as with whole states. Only this rank's part stays in memory.
    """
    if not (is_split() and dropout.training and dropout.p):
        return functional.dropout(states, dropout.p, dropout.training)
    num, length, *others = states.shape
    ones = states.new_ones(num, length * group.num, *others)
    return states * own_positions(functional.dropout(ones, dropout.p), group)
