"""Log-likelihoods of continuations.

Dimension letters: B batch, T tokens, V vocabulary size, C different next tokens of one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.devices import Stream
from modelzoo_trainer.callback import Outputs
from modelzoo_trainer.core.loop import ValidationLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.evaluation.rows import PADDING, Batch, Ints, RaggedRows

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

HOOK: Final = "eleuther_eval_harness"
_MOST: Final = 16  # next tokens of one row; another row has the rest


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Rows for the model, and which requests each answers.

    Continuations of one context that differ in their last token only share a row, as in `lm_eval`.
    """

    rows: RaggedRows
    last: Ints
    """(rows, C): tokens whose log-probabilities after the row are needed; unused ones are 0."""
    row: Ints
    """Of each request: its row."""
    place: Ints
    """Of each request: the place of its last token in `last`."""
    length: Ints
    """Of each request: the number of tokens of its continuation."""

    def pack(self) -> dict[str, Ints]:
        """Return its arrays by name."""
        names = ("last", "row", "place", "length")
        own = {name: getattr(self, name) for name in names}
        return own | {"tokens": self.rows.tokens, "lengths": self.rows.lengths}

    @classmethod
    def unpack(cls, arrays: dict[str, Ints]) -> ScoringPlan:
        """Return the plan whose arrays `pack` returned."""
        given = dict(arrays)
        return cls(RaggedRows(given.pop("tokens"), given.pop("lengths")), **given)


def plan_scoring(requests: Sequence[tuple[list[int], list[int]]], limit: int) -> ScoringPlan:
    """Return the rows of requests, each a context and its continuation, in tokens.

    A row that is longer than `limit` tokens loses the first ones.

    Raises:
        ConfigError: If a continuation is empty, or longer than the limit.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    places: dict[tuple[int, ...], list[dict[int, int]]] = defaultdict(list)
    found: list[list[int]] = []
    targets: list[dict[int, int]] = []
    row, place, length = [], [], []
    for context, continuation in requests:
        if not context or not continuation or len(continuation) > limit:
            raise ConfigError(
                f"EleutherEvalHarness: a request has {len(context)} tokens of context and "
                f"{len(continuation)} to score; both must have one, and {limit} is the most that "
                f"can be scored. Set max_sequence_length, or use another task."
            )
        key = tuple(context + continuation[:-1])
        own, parts = rows.setdefault(key, []), places[key]
        if not parts or (continuation[-1] not in parts[-1] and len(parts[-1]) == _MOST):
            parts.append({})
            own.append(len(found))
            found.append(list(key[-limit:]))
            targets.append(parts[-1])
        place.append(parts[-1].setdefault(continuation[-1], len(parts[-1])))
        row.append(own[-1])
        length.append(len(continuation))
    width = max(map(len, targets), default=1)
    last = [[*each, *[0] * (width - len(each))] for each in targets]
    arrays = (np.array(values, np.int64) for values in (last, row, place, length))
    return ScoringPlan(RaggedRows.of(found), *arrays)


class ScoringLoop(ValidationLoop):
    """A validation that computes log-likelihoods instead of a loss.

    `results`: numbers of requests, log-likelihoods, and whether each continuation is greedy.
    """

    needs_all_batches = True

    def __init__(self, plan: ScoringPlan) -> None:
        super().__init__(hook=HOOK)
        self._plan = plan
        self._of_row: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(plan.row.tolist()):
            self._of_row[row].append(number)
        self._found: dict[int, tuple[float, bool]] = {}

    @property
    def results(self) -> dict[str, Any]:
        """The results of this process."""
        values = list(self._found.values())
        return {
            "index": np.array(list(self._found), np.int64),
            "score": np.array([score for score, _ in values], np.float64),
            "is_greedy": np.array([is_greedy for _, is_greedy in values], np.int64),
        }

    @override
    def step(self, trainer: Trainer, batch: Batch, batch_idx: int) -> Outputs:
        with trainer.backend.step(batch_idx, Stream.VALIDATE):
            trainer.call(self.on_step_start_hook, trainer.model, batch)
            with trainer.precision.autocast or nullcontext():
                outputs: Outputs = score(trainer.model, batch)
            trainer.call(self.on_step_end_hook, trainer.model, outputs, batch)
        trainer.read([*outputs.values(), *(batch[key] for key in _KEPT)], self._take)
        return outputs

    def _take(self, values: list[Any]) -> None:
        own, last, greedy, tokens, index, lengths, targets = values
        for number, row in enumerate(index.tolist()):
            if row != PADDING:
                self._take_row(
                    row,
                    (own[number], last[number], greedy[number]),
                    tokens[number],
                    int(lengths[number]),
                    targets[number],
                )

    def _take_row(
        self,
        row: int,
        outputs: tuple[Tensor, Tensor, Tensor],
        tokens: Tensor,
        end: int,
        targets: Tensor,
    ) -> None:
        own, last, greedy = outputs
        for number in self._of_row[row]:
            place = int(self._plan.place[number])
            begin = max(end - int(self._plan.length[number]), 0)
            scores = torch.cat((own[begin : end - 1], last[place : place + 1]))
            expected = torch.cat((tokens[begin + 1 : end], targets[place : place + 1]))
            is_greedy = torch.equal(greedy[begin:end], expected)
            self._found[number] = float(scores.sum()), is_greedy


_KEPT: Final = ("input_ids", "index", "lengths", "last")


def score(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return log-probabilities and the most likely tokens.

    Shapes:
        Returns: `own` (B, T), of each next token in its row; `last` (B, C), of `batch["last"]`
        after the row; `greedy` (B, T). Floating ones are float32 or float64.
    """
    tokens = batch["input_ids"]
    logits: Tensor = model.logits(tokens)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.log_softmax(dim=-1, dtype=dtype)
    following = tokens.roll(-1, dims=1)
    ends = (batch["lengths"] - 1)[:, None, None].expand(-1, 1, scores.shape[-1])
    return {
        "own": scores.gather(2, following[..., None])[..., 0],
        "last": scores.gather(1, ends)[:, 0].gather(1, batch["last"]),
        "greedy": logits.argmax(dim=-1),
    }
