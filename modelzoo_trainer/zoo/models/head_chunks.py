"""Losses and gradients of a head for a chunk of tokens at a time.

Dimension letters: N tokens, H hidden size, V vocabulary size, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.zoo.models.autocast import without_autocast

_FRACTION: Final = 16  # of the tokens are in a chunk, or of the outputs in a piece
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


class VocabularyShards(Protocol):
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


class Wanted(NamedTuple):
    """Which gradients are computed, and whether the largest logits are compared with labels."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    hits: bool = False


class Plan(NamedTuple):
    """How the losses are computed."""

    settings: HeadSettings
    dtype: torch.dtype  # of the matrix products
    wanted: Wanted
    shards: VocabularyShards | None


class ChunkResults(NamedTuple):
    """Losses, hits and gradients."""

    losses: Tensor  # (N,): of labels without their weights; 0 where these are 0
    hits: Tensor  # (N,) bool; empty if not wanted
    hidden: Tensor  # gradients of the weighted sum; empty if not wanted
    weight: Tensor
    bias: Tensor


def chunk_size(num_tokens: int, num_outputs: int) -> int:
    """Return the number of tokens whose logits are computed at once."""
    size = max(num_tokens // _FRACTION, _SMALL // num_outputs, _FEWEST)
    size = min(size, max(_LARGE // num_outputs, _FEWEST), num_tokens)
    num_chunks = -(-num_tokens // max(size, 1))
    return max(1, -(-num_tokens // max(num_chunks, 1)))  # all about equal


@torch.no_grad()
def sweep(inputs: HeadInputs, plan: Plan) -> ChunkResults:
    """Go over all chunks of tokens."""
    with without_autocast(inputs.hidden.device.type):
        return _Sweep(inputs, plan).run()


class _Sweep:
    """Losses and gradients, chunk by chunk."""

    def __init__(self, inputs: HeadInputs, plan: Plan) -> None:
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

    def run(self) -> ChunkResults:
        """Return what is wanted."""
        num, shards = len(self.inputs.labels), self.plan.shards
        rows = self.inputs.weight.shape[0] if shards is None else shards.num_rows
        size = chunk_size(num, rows)
        for first in range(0, num, size):
            self._add(slice(first, min(first + size, num)))
        if self.plan.wanted.hidden and shards is not None:
            self.of_hidden = shards.sum(self.of_hidden)
        hidden, weight, bias, *_ = self.inputs
        wanted = self.plan.wanted
        return ChunkResults(
            self.losses,
            self.hits,
            self.of_hidden,
            _finished(self.of_weight, weight if wanted.weight else None, hidden),
            _finished(self.of_bias, bias if wanted.bias else None, hidden),
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
    column: Tensor  # (C, 1): of the label
    is_here: Tensor | None  # (C,): whether the label is one of the columns; None = always
    factor: Tensor  # (C,): what exp(scores) are multiplied by to be probabilities


def _softmax(scores: Tensor, labels: Tensor, plan: Plan) -> _Softmax:
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


def _combined(shards: VocabularyShards, own: tuple[Any, ...], num_here: int) -> Any:
    """Combine the sums of all processes in one message.

    Returns:
        The factor of this process's exponentials; the sum of exponentials, the label's logit, hits
        and the sum of logits, all relative to the peak of all.
    """
    peaks, totals, picked, is_here, hits, sums = own
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


def _gradient(exps: Tensor, found: _Softmax, factors: Tensor, plan: Plan) -> Tensor:
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
    picked = exps.gather(1, found.column) - of_label[:, None]
    return exps.scatter_(1, found.column, picked)


def _with_product(total: Tensor | None, gradient: Tensor, states: Tensor) -> Tensor:
    """Add the product of a chunk to the gradient of the weight, in float32 at least.

    In float16, a sum over the tokens of a chunk may be too large: it is computed in float32. What
    is computed or converted at once is small beside the weight.
    """
    exact = torch.promote_types(gradient.dtype, torch.float32)
    if exact == gradient.dtype:
        product = gradient.t()
        return product @ states if total is None else total.addmm_(product, states)
    num_outputs, size = gradient.shape[1], states.shape[1]
    if total is None:
        total = gradient.new_zeros(num_outputs, size, dtype=exact)
    dtype = exact if gradient.dtype == torch.float16 else gradient.dtype
    states, rows = states.to(dtype), max(_PIECE // size, num_outputs // _FRACTION, 1)
    pieces = zip(torch.split(total, rows), torch.split(gradient, rows, dim=1), strict=True)
    for target, source in pieces:
        target.add_(source.t().to(dtype) @ states)
    return total


def _finished(gradient: Tensor | None, param: Tensor | None, hidden: Tensor) -> Tensor:
    """Return a gradient in the type of its parameter; nothing for no parameter.

    A sum over all labels may be too large for float16, which the mean is not.
    """
    if param is None:
        return hidden.new_empty(0)
    if gradient is None:  # no tokens
        return torch.zeros_like(param)
    return gradient if param.dtype == torch.float16 else gradient.to(param.dtype)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of losses, float32."""
    return (losses * weights.where(weights != 0, 0.0)).sum().float()


def types_of(inputs: HeadInputs) -> tuple[torch.dtype | None, ...]:
    """Return the types of the states, the weight and the bias."""
    return tuple(None if one is None else one.dtype for one in inputs[:3])


def scaled(
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
    pieces = zip(torch.split(result, rows), torch.split(gradient, rows), strict=True)
    for target, source in pieces:
        target.copy_(source.to(exact) * factor)
    return result
