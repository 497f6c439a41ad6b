"""Operators of torch for the loss of a head in compiled models.

A loop over chunks would be unrolled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.base.devices import define_operator
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
    """Return a plan as arguments of the operators."""
    return (*plan.settings, plan.dtype, list(plan.wanted))


def _sum(*given: Any) -> tuple[Tensor, ...]:
    """Return the sum, the losses, the hits, and the gradients."""
    inputs, plan = _read(given)
    found = sweep(inputs, plan)
    return weighted_sum(found.losses, inputs.weights), *found


def _each(*given: Any) -> Tensor:
    """Return the losses."""
    return sweep(*_read(given)).losses


def _read(given: Sequence[Any]) -> tuple[HeadInputs, Plan]:
    *settings, dtype, wanted = given[5:]
    return HeadInputs(*given[:5]), Plan(HeadSettings(*settings), dtype, Wanted(*wanted), None)


def _shapes(*given: Any) -> tuple[Tensor, ...]:
    inputs, plan = _read(given)
    hidden, wanted = inputs.hidden, plan.wanted
    exact = torch.promote_types(plan.dtype, torch.float32)
    losses = inputs.labels.new_empty(inputs.labels.shape, dtype=exact)
    hits = losses.new_empty(losses.shape if wanted.hits else 0, dtype=torch.bool)
    of_hidden = torch.empty_like(hidden) if wanted.hidden else hidden.new_empty(0)
    of_weight, of_bias = (
        torch.empty_like(param, dtype=exact if param.dtype == torch.float16 else param.dtype)
        if param is not None and is_wanted
        else hidden.new_empty(0)
        for param, is_wanted in ((inputs.weight, wanted.weight), (inputs.bias, wanted.bias))
    )
    total = losses.new_empty((), dtype=torch.float32)
    return total, losses, hits, of_hidden, of_weight, of_bias


def _shape_of_each(*given: Any) -> Tensor:
    return _shapes(*given)[1]


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


def _flops(hidden: Any, weight: Any, *given: Any, **_: Any) -> int:
    """Return the operations of the matrix products."""
    num_products: int = 1 + sum(given[-1][:2])
    num: int = hidden[0] * hidden[1] * weight[0]
    return 2 * num_products * num


_INPUTS: Final = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor weights, float scale, "
    "float? softcap, float smoothing, ScalarType dtype, bool[] wanted"
)
sum_op: Final = define_operator(
    f"sum_of_losses({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sum,
    _shapes,
    flops=_flops,
    keep=_keep_gradients,
    backward=_multiply_gradients,
)
"""As `_Sum` in `head_loss.py`; also returns the gradients, which only its backward pass uses."""
each_op: Final = define_operator(
    f"label_losses({_INPUTS}) -> Tensor",
    _each,
    _shape_of_each,
    flops=_flops,
    keep=_keep_inputs,
    backward=_compute_gradients,
)
"""As `_Each` in `head_loss.py`."""
