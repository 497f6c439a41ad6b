"""Text after prompts, a token at a time, for prompts of different lengths together.

Dimension letters: B batch, T tokens, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.devices import Stream
from modelzoo_trainer.callback import Outputs
from modelzoo_trainer.core.loop import ValidationLoop
from modelzoo_trainer.zoo.evaluation.rows import PADDING, Batch, Ints, RaggedRows
from modelzoo_trainer.zoo.evaluation.scoring import HOOK

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer
    from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache

_EVERY: Final = 8  # tokens after which processes ask each other whether all rows have ended
_BATCH_BITS, _SEED_BITS = 20, 44  # a step's number: seed, batch, position

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Args:
        max_new_tokens: Maximum number of tokens after a prompt.
        temperature: 0 = the most likely token.
        top_k: Sample among the `top_k` most likely tokens; None = all.
        top_p: Sample among the most likely tokens whose probabilities add up to `top_p`; 1 = all.
        seed: Seed of the sampling, besides the run's.
        ends: The tokens that end a text.
        stops: Texts that end a text.
        lookback: Tokens in which a text of `stops` is looked for, from the newest one.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    ends: Sequence[int]
    stops: Sequence[str] = ()
    lookback: int = 0


def choose(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each row.

    Shapes:
        scores: (B, V) floating. Returns: (B,), int64.
    """
    if sampling.temperature == 0:
        return scores.argmax(dim=-1)
    scores = scores.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        is_out = shares.cumsum(dim=-1) - shares >= sampling.top_p
        scores = scores.scatter(-1, order, ordered.masked_fill(is_out, float("-inf")))
    return torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]


class _Endings:
    """Finds on the host which rows have ended."""

    def __init__(self, lengths: list[int], index: list[int], sampling: Sampling, decode: Decode):
        self.found: list[list[int]] = [[] for _ in lengths]
        self._lengths = lengths
        self._sampling = sampling
        self._decode = decode
        self._open = {number for number, row in enumerate(index) if row != PADDING}

    @property
    def is_done(self) -> bool:
        """Whether all rows have ended."""
        return not self._open

    def add(self, position: int, column: list[int]) -> None:
        """Add the token of each row at a position."""
        for number in tuple(self._open):
            if position < self._lengths[number]:
                continue  # a token of the prompt
            own = self.found[number]
            own.append(column[number])
            if len(own) == self._sampling.max_new_tokens or self._ends(own):
                self._open.discard(number)

    def _ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._sampling.ends:
            return True
        if not self._sampling.stops:
            return False
        text = self._decode(tokens[-self._sampling.lookback :])
        return any(stop in text for stop in self._sampling.stops)


class DecodingLoop(ValidationLoop):
    """A validation that writes text after prompts instead of computing a loss.

    `results`: numbers of prompts, the tokens after them, and how many there are.

    Keys and values of earlier tokens are kept if the model can do that and not each length is
    another graph. Rows of different lengths have the same positions: while a row still has tokens
    of its prompt, these are taken instead of the model's.

    Args:
        sampling: How tokens are chosen.
        decode: Converts tokens to text, with special tokens.
    """

    needs_all_batches = True

    def __init__(self, sampling: Sampling, decode: Decode) -> None:
        super().__init__(hook=HOOK)
        self._sampling = sampling
        self._decode = decode
        self._found: dict[int, list[int]] = {}

    @property
    def results(self) -> dict[str, Any]:
        """The results of this process."""
        rows = RaggedRows.of(list(self._found.values()))
        index = np.array(list(self._found), np.int64)
        return {"index": index, "tokens": rows.tokens, "lengths": rows.lengths}

    @override
    def step(self, trainer: Trainer, batch: Batch, batch_idx: int) -> Outputs:
        # host read: waits for the device; between steps, there is nothing else to do
        lengths, index = batch["lengths"].tolist(), batch["index"].tolist()
        begin, end = min(lengths), max(lengths) + self._sampling.max_new_tokens
        endings = _Endings(lengths, index, self._sampling, self._decode)
        scores_at = self._scorer(trainer, batch, begin, end)
        number = (self._sampling.seed << _SEED_BITS) + (batch_idx << _BATCH_BITS)
        outputs: Outputs = {"tokens": batch["input_ids"]}
        for num in count(1):
            # Others may need more steps; until then, the last one is repeated.
            position = min(begin + num, end) - 1
            with trainer.backend.step(number + position, Stream.VALIDATE):
                if num == 1:
                    trainer.call(self.on_step_start_hook, trainer.model, batch)
                with trainer.precision.autocast or nullcontext():
                    column = self._next(scores_at, batch, position)
                if num == 1:
                    trainer.call(self.on_step_end_hook, trainer.model, outputs, batch)
            endings.add(position, column.tolist())  # host read: waits for the device
            if self._may_stop(trainer, endings, num):
                break
        pairs = zip(index, endings.found, strict=True)
        self._found |= {row: tokens for row, tokens in pairs if row != PADDING}
        return outputs

    def _may_stop(self, trainer: Trainer, endings: _Endings, num: int) -> bool:
        backend = trainer.backend
        if not backend.caps.sharded_state:
            return endings.is_done
        if num % _EVERY:  # each forward pass is collective
            return False
        return not backend.comm.any_true(not endings.is_done)

    def _next(self, scores_at: Callable[[int], Tensor], batch: Batch, position: int) -> Tensor:
        """Write the tokens at a position into the batch, and return them, (B,)."""
        tokens = batch["input_ids"]
        drawn = choose(scores_at(position), self._sampling)
        place = torch.full((1,), position, device=tokens.device)  # one graph for all positions
        given = tokens.index_select(1, place)[:, 0]
        column = torch.where(batch["lengths"] > place, given, drawn)
        tokens.index_copy_(1, place, column[:, None])
        return column

    def _scorer(
        self, trainer: Trainer, batch: Batch, begin: int, end: int
    ) -> Callable[[int], Tensor]:
        """Return the function that returns the scores of the tokens at a position, (B, V)."""
        model: Any = trainer.model
        tokens = batch["input_ids"]
        is_static = trainer.backend.caps.static_shapes
        make = getattr(model, "make_caches", None)
        caches: Sequence[KeyValueCache] | None = None
        if callable(make) and callable(getattr(model, "last_logits", None)) and not is_static:
            caches = make(end)
        if caches is not None:
            is_first = True

            def from_cache(position: int) -> Tensor:
                nonlocal is_first
                if is_first:
                    is_first = False
                    first: Tensor = model.last_logits(tokens[:, :begin], caches, None)
                    return first
                place = torch.full((1,), position - 1, device=tokens.device)
                last = tokens[:, position - 1 : position]
                following: Tensor = model.last_logits(last, caches, place)
                return following

            return from_cache

        def from_all(position: int) -> Tensor:
            if not is_static:
                whole: Tensor = model.logits(tokens[:, :position])
                return whole[:, -1]
            place = torch.full((1,), position - 1, device=tokens.device)
            padded: Tensor = model.logits(tokens)
            return padded.index_select(1, place)[:, 0]

        return from_all


def pack(rows: RaggedRows, sampling: Sampling) -> dict[str, Any]:
    """Return prompts and how to continue them as values that can be sent."""
    own = {name: getattr(sampling, name) for name in Sampling.__slots__}
    own |= {name: list(own[name]) for name in ("ends", "stops")}
    return {"tokens": rows.tokens, "lengths": rows.lengths, "sampling": own}


def unpack(given: dict[str, Any]) -> tuple[RaggedRows, Sampling]:
    """Return what `pack` was given."""
    return RaggedRows(given["tokens"], given["lengths"]), Sampling(**given["sampling"])


def texts_of(found: dict[str, Ints]) -> dict[int, list[int]]:
    """Return the tokens after each prompt, by its number."""
    parts = RaggedRows(found["tokens"], found["lengths"]).split()
    return {
        number: part.tolist() for number, part in zip(found["index"].tolist(), parts, strict=True)
    }
