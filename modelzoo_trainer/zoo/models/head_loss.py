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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_FRACTION: Final = 16  # of the tokens are in a chunk
_FEWEST: Final = 128  # tokens in a chunk: with fewer, matrix products are slow
_SMALL: Final = 2**22  # logits that are computed at once in any case
_LARGE: Final = 2**27  # logits that are computed at once at most
_PIECE: Final = 2**24  # numbers that are converted at once


class HeadSettings(NamedTuple):
    """How logits are computed from the output of the linear layer, and the loss from them."""

    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """Bound of the logits, after the factor: bound * tanh(logits / bound)."""
    label_smoothing: float = 0.0
    """Share of a label that is spread evenly over the vocabulary."""


class OutputShards(Protocol):
    """The part of a head's outputs that this process computes; see tensor parallelism."""

    first: int
    """The first output of this process."""
    num_rows: int
    """The largest number of outputs of a process."""
    num_outputs: int
    """The number of outputs of all processes."""
    num_hooks: int
    """The number of hooks of the layer that it has for being split."""
    is_usable: bool
    """Whether each process has outputs."""

    def local(self, param: Tensor) -> Tensor:
        """Return this process's rows of a parameter."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all processes, with a dimension more in front."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all processes."""


class HeadInputs(NamedTuple):
    """What the losses are computed from."""

    hidden: Tensor
    """(N, H): what the linear layer gets."""
    weight: Tensor
    """(V, H), or this process's rows."""
    bias: Tensor | None
    """(V,), or this process's rows."""
    labels: Tensor
    """(N,) integer. Those with the weight 0 may have any value."""
    weights: Tensor
    """(N,) floating."""


class _Wanted(NamedTuple):
    """Which gradients are computed, and whether the largest logits are compared with labels."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    hits: bool = False


class _Plan(NamedTuple):
    settings: HeadSettings
    dtype: torch.dtype  # of the matrix products
    wanted: _Wanted
    shards: OutputShards | None


class _Found(NamedTuple):
    losses: Tensor  # (N,): of labels without their weights; 0 where these are 0
    hits: Tensor  # (N,) bool; empty if not wanted
    hidden: Tensor  # gradients of the weighted sum; empty if not wanted
    weight: Tensor
    bias: Tensor


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
    shards: OutputShards | None = None,
) -> HeadLosses:
    """Return the weighted sum of the losses of all labels, and each of them.

    The softmax is computed in float32 (float64 for states of that type). Under autocast, matrix
    products have its type, as those of a linear layer.

    Args:
        inputs: The states and labels; what has the weight 0 may be non-finite.
        settings: Of the head.
        wants_hits: Whether `hits` is computed.
        shards: The part of the vocabulary that `weight` and `bias` have; None = all of it.

    Cost:
        Memory of at most a sixteenth of the logits, or of 128 tokens; with gradients, their memory
        from the forward pass on. No host read, no data-dependent shape.
    """
    wanted = _Wanted(*_needed(inputs), wants_hits)
    plan = _Plan(settings, _product_type(inputs.hidden), wanted, shards)
    if not torch.compiler.is_compiling():
        total, losses, hits = _Sum.apply(*inputs, plan)
    elif shards is not None:
        total, losses, hits = _uncompiled_sum(inputs, plan)
    else:
        total, losses, hits, *_ = _sum_op(*inputs, *_as_arguments(plan))
    return HeadLosses(total, losses.detach(), hits if wants_hits else None)


def label_losses(
    inputs: HeadInputs, settings: HeadSettings, *, shards: OutputShards | None = None
) -> Tensor:
    """Return the loss of each label, 0 where its weight is 0; otherwise weights do not matter.

    Args:
        inputs: As of `sum_of_losses`.
        settings: Of the head.
        shards: As of `sum_of_losses`.

    Shapes:
        Returns: (N,), float32.

    Cost:
        As `sum_of_losses`, but the logits are computed again in the backward pass.
    """
    plan = _Plan(settings, _product_type(inputs.hidden), _Wanted(), shards)
    if not torch.compiler.is_compiling():
        losses: Tensor = _Each.apply(*inputs, plan)
    elif shards is not None:
        losses = _uncompiled_each(inputs, plan)
    else:
        losses = _each_op(*inputs, *_as_arguments(plan))
    return losses.float()


# ---- chunks


def chunk_size(num_tokens: int, num_outputs: int) -> int:
    """Return the number of tokens whose logits are computed at once."""
    size = max(num_tokens // _FRACTION, _SMALL // num_outputs, _FEWEST)
    size = min(size, max(_LARGE // num_outputs, _FEWEST), num_tokens)
    num_chunks = -(-num_tokens // max(size, 1))
    return max(1, -(-num_tokens // max(num_chunks, 1)))  # all about equal


@torch.no_grad()
def _sweep(inputs: HeadInputs, plan: _Plan) -> _Found:
    """Go over all chunks of tokens."""
    with _without_autocast(inputs.hidden.device.type):
        return _Sweep(inputs, plan).run()


class _Sweep:
    """Losses and gradients, chunk by chunk."""

    def __init__(self, inputs: HeadInputs, plan: _Plan) -> None:
        hidden, weight, bias, labels, _ = inputs
        self.inputs = inputs
        self.plan = plan
        self.weight = weight.to(plan.dtype)
        self.bias = None if bias is None else bias.to(plan.dtype)
        exact = torch.promote_types(plan.dtype, torch.float32)
        wanted = plan.wanted
        self.losses = labels.new_zeros(labels.shape, dtype=exact)
        self.hits = labels.new_zeros(labels.shape if wanted.hits else 0, dtype=torch.bool)
        self.of_hidden = torch.empty_like(hidden) if wanted.hidden else hidden.new_empty(0)
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def run(self) -> _Found:
        """Return what is wanted."""
        num, shards = len(self.inputs.labels), self.plan.shards
        rows = self.inputs.weight.shape[0] if shards is None else shards.num_rows
        size = chunk_size(num, rows)
        for first in range(0, num, size):
            self._add(slice(first, min(first + size, num)))
        if self.plan.wanted.hidden and shards is not None:
            self.of_hidden = shards.sum(self.of_hidden)
        return _Found(
            self.losses,
            self.hits,
            self.of_hidden,
            _finished(self.of_weight, self.inputs.weight, is_wanted=self.plan.wanted.weight),
            _finished(self.of_bias, self.inputs.bias, is_wanted=self.plan.wanted.bias),
        )

    def _add(self, part: slice) -> None:
        """Compute the losses and gradients of some tokens."""
        plan, weights = self.plan, self.inputs.weights[part]
        counts = weights != 0
        # Without what does not count, which may be non-finite: 0 * nan is nan.
        states = self.inputs.hidden[part].to(plan.dtype).masked_fill(~counts[:, None], 0.0)
        is_trained = any(plan.wanted[:3])
        scores, slopes = self._scores(states, wants_slopes=is_trained)
        found = _softmax(scores, self.inputs.labels[part].long().where(counts, 0), plan)
        self.losses[part] = found.losses.masked_fill(~counts, 0.0)
        if found.hits is not None:
            self.hits[part] = found.hits & counts
        if is_trained:
            factors = weights.to(scores.dtype) * plan.settings.scale
            gradient = _gradient(scores, found, factors, plan)
            if slopes is not None:
                gradient.mul_(slopes)
            self._add_gradients(part, states, gradient)

    def _scores(self, states: Tensor, *, wants_slopes: bool) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and the slopes of their bound, if there is one."""
        scale, softcap, _ = self.plan.settings
        scores = functional.linear(states, self.weight, self.bias)
        scores = scores.to(self.losses.dtype)
        if scale != 1:
            scores.mul_(scale)
        if softcap is None:
            return scores, None
        scores.div_(softcap).tanh_()
        slopes = (scores * scores).neg_().add_(1) if wants_slopes else None
        return scores.mul_(softcap), slopes

    def _add_gradients(self, part: slice, states: Tensor, gradient: Tensor) -> None:
        wanted = self.plan.wanted
        if wanted.bias:
            own = gradient.sum(dim=0)
            self.of_bias = own if self.of_bias is None else self.of_bias.add_(own)
        gradient = gradient.to(self.plan.dtype)
        if wanted.hidden:
            self.of_hidden[part] = gradient @ self.weight
        if wanted.weight:
            self.of_weight = _with_product(self.of_weight, gradient, states)


class _Softmax(NamedTuple):
    losses: Tensor  # (C,)
    hits: Tensor | None  # (C,)
    index: Tensor  # (C, 1): the label's column
    is_here: Tensor | None  # (C,): whether the label is one of the columns; None = always
    factor: Tensor  # (C,): what exp(scores) are multiplied by to be probabilities


def _softmax(scores: Tensor, labels: Tensor, plan: _Plan) -> _Softmax:
    """Replace scores by exp(scores - peak of the row), and return what makes them a softmax."""
    shards, smoothing = plan.shards, plan.settings.label_smoothing
    num_here = num = scores.shape[1]
    index, is_here = labels, None
    if shards is not None:
        num = shards.num_outputs
        index = labels - shards.first
        is_here = (index >= 0) & (index < num_here)
        is_valid = (labels >= 0) & (labels < num)  # else it is an error, as without shards
        index = index.where(is_here, 0).where(is_valid, num_here)
    hits = scores.argmax(dim=1) == index if plan.wanted.hits else None
    if hits is not None and is_here is not None:
        hits = hits & is_here
    index = index[:, None]
    peaks = scores.amax(dim=1, keepdim=True)
    scores.sub_(peaks)
    picked = scores.gather(1, index)[:, 0]
    sums = scores.sum(dim=1) if smoothing else None
    scores.exp_()
    totals = scores.sum(dim=1)
    factor = None
    if shards is not None:
        facts = _combined(shards, (peaks[:, 0], totals, picked, is_here, hits, sums), num_here)
        factor, totals, picked, hits, sums = facts
    losses = totals.log() - (1 - smoothing) * picked
    if sums is not None:
        losses -= sums * (smoothing / num)
    factor = totals.reciprocal() if factor is None else factor / totals
    return _Softmax(losses, hits, index, is_here, factor)


def _combined(shards: OutputShards, own: tuple[Tensor | None, ...], num_here: int) -> Any:
    """Combine the sums of all processes in one message.

    Returns:
        The factor of this process's exponentials; the sum of exponentials, the label's logit, hits
        and the sum of logits, all relative to the peak of all.
    """
    peaks, totals, picked, is_here, hits, sums = own
    assert peaks is not None and picked is not None and is_here is not None and totals is not None
    none = torch.zeros_like(peaks)
    rows = [peaks, totals, picked, is_here, none if hits is None else hits]
    rows += [none if sums is None else sums + num_here * peaks]
    every = shards.gather(torch.stack([one.to(peaks.dtype) for one in rows]))
    all_peaks, all_totals, all_picked, are_here, all_hits, all_sums = every.unbind(dim=1)
    peak = all_peaks.amax(dim=0)
    shifts = all_peaks - peak
    has_peak = shifts == 0
    is_first = has_peak & (has_peak.cumsum(dim=0) == 1)
    return (
        (peaks - peak).exp(),
        (all_totals * shifts.exp()).sum(dim=0),
        (all_picked + shifts).where(are_here != 0, 0.0).sum(dim=0),
        None if hits is None else (is_first & (all_hits != 0)).any(dim=0),
        None if sums is None else all_sums.sum(dim=0) - shards.num_outputs * peak,
    )


def _gradient(exps: Tensor, found: _Softmax, factors: Tensor, plan: _Plan) -> Tensor:
    """Overwrite exponentials by the gradient with respect to the scores.

    `factors`: (C,), the weights of the labels.
    """
    smoothing = plan.settings.label_smoothing
    num = exps.shape[1] if plan.shards is None else plan.shards.num_outputs
    exps.mul_((found.factor * factors)[:, None])
    if smoothing:
        exps.sub_((factors * (smoothing / num))[:, None])
    of_label = factors * (1 - smoothing)
    if found.is_here is not None:
        of_label = of_label * found.is_here
    picked = exps.gather(1, found.index) - of_label[:, None]
    return exps.scatter_(1, found.index, picked)


def _with_product(total: Tensor | None, gradient: Tensor, states: Tensor) -> Tensor:
    """Add the product of a chunk to the gradient of the weight, in float32 at least."""
    exact = torch.promote_types(gradient.dtype, torch.float32)
    if total is not None and exact == gradient.dtype:
        return total.addmm_(gradient.t(), states)
    product = gradient.t() @ states
    return product.to(exact) if total is None else total.add_(product)


def _finished(gradient: Tensor | None, param: Tensor | None, *, is_wanted: bool) -> Tensor:
    """Return a gradient in the type of its parameter.

    A sum over all labels may be too large for float16, which the mean is not.
    """
    if param is None or not is_wanted:
        return torch.empty(0)
    if gradient is None:  # no tokens
        return torch.zeros_like(param)
    return gradient if param.dtype == torch.float16 else gradient.to(param.dtype)


# ---- gradients


class _Sum(torch.autograd.Function):
    """The weighted sum; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return the sum, the losses and the hits."""
        *tensors, plan = given
        inputs = HeadInputs(*tensors)
        found = _sweep(inputs, plan)
        ctx.save_for_backward(*found[2:])
        ctx.types = _types_of(inputs)
        ctx.mark_non_differentiable(found.losses, found.hits)
        ctx.set_materialize_grads(False)
        return _weighted_sum(found.losses, inputs.weights), found.losses, found.hits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by that of the sum."""
        factor, *_ = given
        if factor is None:
            return (None,) * 6
        saved = zip(ctx.saved_tensors, ctx.types, ctx.needs_input_grad, strict=False)
        is_last = not _keeps_graph()
        gradients = [
            _scaled(one, factor, dtype, in_place=is_last) if is_needed else None
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
        return _sweep(inputs, plan).losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        """Compute the gradients chunk by chunk, with those of the losses as weights."""
        inputs = HeadInputs(*ctx.saved_tensors)
        needed = ctx.needs_input_grad[:3]
        plan = ctx.plan._replace(wanted=_Wanted(*needed))
        found = _sweep(inputs._replace(weights=given[0].where(inputs.weights != 0, 0.0)), plan)
        gradients = (
            one.to(dtype) if is_needed else None
            for one, dtype, is_needed in zip(found[2:], _types_of(inputs), needed, strict=True)
        )
        return (*gradients, None, None, None)


def _weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights.where(weights != 0, 0.0)).sum().float()


def _types_of(inputs: HeadInputs) -> tuple[torch.dtype | None, ...]:
    return tuple(None if one is None else one.dtype for one in inputs[:3])


def _scaled(
    gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool = False
) -> Tensor:
    """Return the product of a gradient and a number, computed in the number's type at least.

    A number that is rounded to 16 bits would change the length of all gradients alike.
    """
    exact = torch.promote_types(gradient.dtype, factor.dtype)
    if gradient.dtype == exact:
        scaled = gradient.mul_(factor) if in_place else gradient * factor
        return scaled.to(dtype)
    result = gradient if in_place and gradient.dtype == dtype else torch.empty_like(gradient)
    if result.dtype != dtype or not gradient.dim():
        return (gradient.to(exact) * factor).to(dtype)
    rows = max(1, _PIECE // max(1, gradient[:1].numel()))
    for target, source in zip(result.split(rows), gradient.split(rows), strict=True):
        target.copy_(source.to(exact) * factor)
    return result


def _keeps_graph() -> bool:
    """Return whether the gradients may be needed again, for another backward pass."""
    found = getattr(torch._C, "_get_current_graph_task_keep_graph", None)
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


def _product_type(hidden: Tensor) -> torch.dtype:
    """Return the type that a linear layer computes in."""
    kind = hidden.device.type
    is_cast = (
        hidden.dtype != torch.float64
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    )
    return torch.get_autocast_dtype(kind) if is_cast else hidden.dtype


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


# ---- in compiled models: one operation each, as a loop over chunks would be unrolled


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _uncompiled_sum(inputs: HeadInputs, plan: _Plan) -> Any:
    return _Sum.apply(*inputs, plan)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _uncompiled_each(inputs: HeadInputs, plan: _Plan) -> Any:
    return _Each.apply(*inputs, plan)


def _as_arguments(plan: _Plan) -> tuple[float, float | None, float, torch.dtype, list[bool]]:
    return (*plan.settings, plan.dtype, list(plan.wanted))


@torch.library.custom_op("modelzoo_trainer::sum_of_losses", mutates_args=())
def _sum_op(  # noqa: PLR0913  # operations of torch have plain arguments
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
    plan = _Plan(HeadSettings(scale, softcap, smoothing), dtype, _Wanted(*wanted), None)
    found = _sweep(inputs, plan)
    return _weighted_sum(found.losses, weights), *found


@_sum_op.register_fake
def _(  # noqa: PLR0913  # as the operation
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
    ctx.types = _types_of(HeadInputs(*inputs[:5]))
    ctx.wanted = inputs[-1][:3]
    ctx.set_materialize_grads(False)


def _multiply_gradients(ctx: Any, factor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if factor is None:
        return (None,) * 10
    gradients = [
        _scaled(one, factor, dtype) if is_wanted else None
        for one, dtype, is_wanted in zip(ctx.saved_tensors, ctx.types, ctx.wanted, strict=True)
    ]
    return (*gradients, *(None,) * 7)


_sum_op.register_autograd(_multiply_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("modelzoo_trainer::label_losses", mutates_args=())
def _each_op(  # noqa: PLR0913  # as the operation above
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
    plan = _Plan(HeadSettings(scale, softcap, smoothing), dtype, _Wanted(*wanted), None)
    return _sweep(inputs, plan).losses


@_each_op.register_fake
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
    found = _sum_op(hidden, weight, bias, labels, weights, *ctx.options, [*needed, False])
    gradients = (
        one.to(param.dtype) if is_needed else None
        for one, param, is_needed in zip(found[3:], (hidden, weight, bias), needed, strict=True)
    )
    return (*gradients, *(None,) * 7)


_each_op.register_autograd(_compute_gradients, setup_context=_keep_inputs)
