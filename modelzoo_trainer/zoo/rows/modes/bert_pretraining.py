"""Objective `bert_pretraining`: documents in pieces, masked by the data processor later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, INPUTS, MASK
from modelzoo_trainer.zoo.rows.interface import Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.sequences import RegionRules, document_piece
from modelzoo_trainer.zoo.rows.modes.special_ids import require_pad
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


class BertPretrainingMode:
    """Rows of one piece of a document each, with the tokens that the tokenizer puts around it.

    All `token_type_ids` are 0: a document is one segment.

    Args:
        settings: The settings of the run.
        tokenizer: Of the run.

    Raises:
        ConfigError: If the tokenizer has no token for padding.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | {"training_objective", "min_sequence_len"}
    features = (INPUTS, MASK, "token_type_ids")
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pad = require_pad(tokenizer)
        self._before, self._after = tokenizer.around()
        self._rules = RegionRules(settings, None)
        self._shortest = settings.processing.min_sequence_len

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        room = length - len(self._before) - len(self._after)
        if room < 1:
            raise ConfigError(f"processing.max_seq_length: {length} has no room for a token.")
        texts = [document_piece(document, self._rules).text for document in documents]
        pieces: list[list[int]] = []
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for document, text, ids in zip(documents, texts, found, strict=True):
            cuts = [ids[start : start + room] for start in range(0, len(ids), room)]
            framed = [[*self._before, *cut, *self._after] for cut in cuts]
            kept = [piece for piece in framed if len(piece) >= self._shortest]
            if not kept:
                stats.skip(document, "too short" if text.strip() else "empty")
            pieces += kept
        data = np.zeros((len(pieces), len(self.features), length), np.int32)
        data[:, 0] = self._pad
        for row, piece in zip(data, pieces, strict=True):
            row[0, : len(piece)] = piece
            row[1, : len(piece)] = 1
        return Rows({DATASET: data}, np.array([len(piece) for piece in pieces], np.int64))
