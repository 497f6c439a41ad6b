"""Operations of torch for the loss of a head in compiled models.

A loop over chunks would be unrolled there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.head_chunks import (
    HeadInputs,
    HeadSettings,
    Plan,
    Wanted,
    scaled,
    sweep,
    types_of,
    weighted_sum,
)


def as_arguments(plan: Plan) -> tuple[float, float | None, float, torch.dtype, list[bool]]:
    """Return a plan as arguments of the operations."""
    return (*plan.settings, plan.dtype, list(plan.wanted))


@torch.library.custom_op("modelzoo_trainer::sum_of_losses", mutates_args=())
def sum_op(  # operations of torch have plain arguments
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    smoothing: float,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, the losses, the hits, and the gradients."""
    inputs = HeadInputs(hidden, weight, bias, labels, weights)
    plan = Plan(HeadSettings(scale, softcap, smoothing), dtype, Wanted(*wanted), None)
    found = sweep(inputs, plan)
    return weighted_sum(found.losses, weights), *found


@sum_op.register_fake
def _(  # as the operation
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    smoothing: float,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    exact = torch.promote_types(dtype, torch.float32)
    losses = labels.new_empty(labels.shape, dtype=exact)
    hits = labels.new_empty(labels.shape if wanted[3] else 0, dtype=torch.bool)
    of_hidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    of_weight, of_bias = (
        hidden.new_empty(0)
        if param is None or not is_wanted
        else torch.empty_like(param, dtype=exact if param.dtype == torch.float16 else param.dtype)
        for param, is_wanted in ((weight, wanted[1]), (bias, wanted[2]))
    )
    total = losses.new_empty((), dtype=torch.float32)
    return total, losses, hits, of_hidden, of_weight, of_bias


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[3:])
    ctx.types = types_of(HeadInputs(*inputs[:5]))
    ctx.wanted = inputs[-1][:3]
    ctx.set_materialize_grads(False)


def _multiply_gradients(ctx: Any, factor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if factor is None:
        return (None,) * 10
    gradients = [
        scaled(one, factor, dtype) if is_wanted else None
        for one, dtype, is_wanted in zip(ctx.saved_tensors, ctx.types, ctx.wanted, strict=True)
    ]
    return (*gradients, *(None,) * 7)


sum_op.register_autograd(_multiply_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("modelzoo_trainer::label_losses", mutates_args=())
def each_op(  # as the operation above
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    smoothing: float,
    dtype: torch.dtype,
    wanted: list[bool],
) -> Tensor:
    """Return the losses."""
    inputs = HeadInputs(hidden, weight, bias, labels, weights)
    plan = Plan(HeadSettings(scale, softcap, smoothing), dtype, Wanted(*wanted), None)
    return sweep(inputs, plan).losses


@each_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *rest: Any) -> Tensor:
    exact = torch.promote_types(rest[-2], torch.float32)
    return labels.new_empty(labels.shape, dtype=exact)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:9]


def _compute_gradients(ctx: Any, given: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, labels, weights = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    weights = given.where(weights != 0, 0.0)
    found = sum_op(hidden, weight, bias, labels, weights, *ctx.options, [*needed, False])
    gradients = (
        one.to(param.dtype) if is_needed else None
        for one, param, is_needed in zip(found[3:], (hidden, weight, bias), needed, strict=True)
    )
    return (*gradients, *(None,) * 7)


each_op.register_autograd(_compute_gradients, setup_context=_keep_inputs)
