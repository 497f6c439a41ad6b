"""Mode `nlg`: contexts with completions that are token ids already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import FEATURES
from modelzoo_trainer.zoo.rows.interface import Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.packing import Weighted, single_rows
from modelzoo_trainer.zoo.rows.modes.sequences import document_turns
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer
from modelzoo_trainer.zoo.rows.turns import Turn

_PADDING = 0


class NlgMode:
    """One document in each row; the completion counts in the loss; 0 fills the row.

    Args:
        settings: The settings of the run.
        tokenizer: The one that made the ids, whose vocabulary they must fit.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"min_sequence_len"})
    features = FEATURES
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._shortest = settings.processing.min_sequence_len

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        sequences = []
        for document in documents:
            turns = {turn.role: turn for turn in document_turns(document)}
            if set(turns) != {"context", "completion"}:
                raise ConfigError(
                    f"{document.where}: nlg needs the turns context and "
                    f"completion; got {', '.join(sorted(turns))}. Use nlg_read_hook."
                )
            context, completion = (
                self._ids(turns[role], document) for role in ("context", "completion")
            )
            size = len(context) + len(completion)
            why = self._why_unusable(context, completion, size, length)
            if why is not None:
                stats.skip(document, why)
                continue
            weights = np.zeros(size, np.int32)
            weights[len(context) :] = 1
            sequences.append(Weighted(np.array(context + completion, np.int32), weights))
        return single_rows(sequences, length, _PADDING)

    def _why_unusable(
        self, context: list[int], completion: list[int], size: int, length: int
    ) -> str | None:
        if not context or not completion:
            return "empty"
        if size < self._shortest:
            return "too short"
        return "too long" if size - 1 > length else None

    def _ids(self, turn: Turn, document: Document) -> list[int]:
        ids: list[int] = []
        for region in turn.regions:
            if isinstance(region.content, str):
                raise ConfigError(
                    f"{document.where}: {turn.role} is text; nlg needs lists of "
                    "token ids. For text use setup.mode: finetuning."
                )
            ids += region.content
        if ids and max(ids) >= self._vocab_size:
            raise ConfigError(
                f"{document.where}: {turn.role} has token {max(ids)}, but the "
                f"tokenizer has {self._vocab_size} tokens. Name the tokenizer that made them."
            )
        return ids
