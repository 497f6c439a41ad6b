"""Cross entropy of a language model's head, without the logits of all tokens.

A head is a linear layer over the vocabulary. Its logits are computed for a chunk of tokens at a
time, and so are the gradients, in the forward pass: in all the same three matrix products as with
the logits of all tokens. For this the weights of the labels must be known, and the gradient of the
sum is a single number, by which the gradients are multiplied in the backward pass (as in
https://arxiv.org/abs/2410.10989). `label_losses` returns the loss of each label instead, whose
gradients are known only in the backward pass: there each chunk is computed again.

`torch.nn.functional.linear_cross_entropy` does the first of these. It is not used: it has no
weights of labels, no bound and no factor of the logits, it breaks a compiled graph, and torch 2.9
lacks it.

Dimension letters: N tokens, H hidden size, V vocabulary size, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from modelzoo_trainer.base.devices import refuse_second_derivatives
from modelzoo_trainer.zoo.models.autocast import product_dtype
from modelzoo_trainer.zoo.models.head_chunks import (
    HeadInputs,
    HeadSettings,
    Plan,
    VocabularyShards,
    Wanted,
    scaled,
    sweep,
    types_of,
    weighted_sum,
)
from modelzoo_trainer.zoo.models.head_operations import as_arguments, each_op, sum_op

_NO_SECOND: Final = (
    "the loss of a head without logits",
    'Set requested_outputs = ("logits",) of the model.',
)


class HeadLosses(NamedTuple):
    """The losses of all labels."""

    total: Tensor
    """(), float32: the weighted sum."""
    losses: Tensor
    """(N,): of labels without their weights, 0 where these are 0; without a gradient."""
    hits: Tensor | None
    """(N,), bool: whether a label has the largest logit; False where the weight is 0."""


def sum_of_losses(
    inputs: HeadInputs,
    settings: HeadSettings,
    *,
    wants_hits: bool = False,
    shards: VocabularyShards | None = None,
) -> HeadLosses:
    """Return the weighted sum of the losses of all labels, and each of them.

    The softmax is computed in float32 (float64 for states of that type). Under autocast, matrix
    products have its type, as in a linear layer.

    Args:
        inputs: The states and labels; what has the weight 0 may be non-finite.
        settings: Of the head.
        wants_hits: Whether `hits` is computed.
        shards: The part of the vocabulary that `weight` and `bias` have; None = all of it.

    Cost:
        Memory of at most a sixteenth of the logits, or of 128 tokens; with gradients, their memory
        from the forward pass on. No host read, no data-dependent shape.
    """
    wanted = Wanted(*_needed(inputs), wants_hits)
    plan = Plan(settings, product_dtype(inputs.hidden), wanted, shards)
    unit = _unit(inputs.weights) if plan.dtype == torch.float16 else None
    if unit is not None:
        inputs = inputs._replace(weights=inputs.weights / unit)
    if not torch.compiler.is_compiling():
        total, losses, hits = _Sum.apply(*inputs, plan)  # type: ignore[no-untyped-call]
    elif shards is not None:
        total, losses, hits = _uncompiled_sum(inputs, plan)
    else:
        total, losses, hits, *_ = sum_op(*inputs, *as_arguments(plan))
    if unit is not None:
        total = total * unit
    return HeadLosses(total, losses.detach(), hits if wants_hits else None)


def label_losses(
    inputs: HeadInputs, settings: HeadSettings, *, shards: VocabularyShards | None = None
) -> Tensor:
    """Return the loss of each label, 0 where its weight is 0; otherwise weights do not matter.

    Args:
        inputs: See `sum_of_losses`.
        settings: Of the head.
        shards: See `sum_of_losses`.

    Shapes:
        Returns: (N,), float32.

    Cost:
        As `sum_of_losses`, but the logits are computed again in the backward pass.
    """
    plan = Plan(settings, product_dtype(inputs.hidden), Wanted(), shards)
    if not torch.compiler.is_compiling():
        losses: Tensor = _Each.apply(*inputs, plan)  # type: ignore[no-untyped-call]
    elif shards is not None:
        losses = _uncompiled_each(inputs, plan)
    else:
        losses = each_op(*inputs, *as_arguments(plan))
    return losses.float()


class _Sum(torch.autograd.Function):
    """The weighted sum; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return the sum, the losses and the hits."""
        *tensors, plan = given
        inputs = HeadInputs(*tensors)
        found = sweep(inputs, plan)
        ctx.save_for_backward(*found[2:])
        ctx.types = types_of(inputs)
        ctx.mark_non_differentiable(found.losses, found.hits)
        ctx.set_materialize_grads(False)
        return weighted_sum(found.losses, inputs.weights), found.losses, found.hits

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by the gradient of the sum."""
        factor, *_ = given
        if factor is None:
            return (None,) * 6
        refuse_second_derivatives(*_NO_SECOND)
        saved = zip(ctx.saved_tensors, ctx.types, ctx.needs_input_grad, strict=False)
        is_last = not _keeps_graph()
        gradients = [
            scaled(one, factor, dtype, in_place=is_last) if is_needed else None
            for one, dtype, is_needed in saved
        ]
        return (*gradients, None, None, None)


class _Each(torch.autograd.Function):
    """The loss of each label; logits are computed again for its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Return the losses."""
        *tensors, plan = given
        inputs = HeadInputs(*tensors)
        ctx.save_for_backward(*inputs)
        ctx.plan = plan
        return sweep(inputs, plan).losses

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        """Compute the gradients chunk by chunk, with the given gradients as weights."""
        refuse_second_derivatives(*_NO_SECOND)
        inputs = HeadInputs(*ctx.saved_tensors)
        needed = ctx.needs_input_grad[:3]
        plan = ctx.plan._replace(wanted=Wanted(*needed))
        found = sweep(inputs._replace(weights=given[0].where(inputs.weights != 0, 0.0)), plan)
        gradients = (
            one.to(dtype) if is_needed else None
            for one, dtype, is_needed in zip(found[2:], types_of(inputs), needed, strict=True)
        )
        return (*gradients, None, None, None)


def _unit(weights: Tensor) -> Tensor:
    """Return the largest weight, float32: products with small weights are 0 in float16.

    The gradients are multiplied by it in the backward pass, together with the scale of the loss.
    """
    if not len(weights):
        return weights.new_ones(())
    largest = weights.abs().amax()
    return largest.where(largest > 0, 1.0)


def _keeps_graph() -> bool:
    """Return whether the gradients may be needed again, for another backward pass."""
    found = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if found is None else bool(found())


def _needed(inputs: HeadInputs) -> tuple[bool, bool, bool]:
    """Return which of the states, the weight and the bias need a gradient."""
    is_on = torch.is_grad_enabled()
    hidden, weight, bias = inputs[:3]
    return (
        is_on and hidden.requires_grad,
        is_on and weight.requires_grad,
        is_on and bias is not None and bias.requires_grad,
    )


@_disable_dynamo  # torch.compiler.disable would import torch's compiler, for seconds
def _uncompiled_sum(inputs: HeadInputs, plan: Plan) -> Any:
    return _Sum.apply(*inputs, plan)  # type: ignore[no-untyped-call]


@_disable_dynamo  # torch.compiler.disable would import torch's compiler, for seconds
def _uncompiled_each(inputs: HeadInputs, plan: Plan) -> Any:
    return _Each.apply(*inputs, plan)  # type: ignore[no-untyped-call]
