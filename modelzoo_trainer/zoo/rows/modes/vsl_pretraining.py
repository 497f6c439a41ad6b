"""Mode `pretraining` with `use_vsl`: documents packed into rows, blind to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from modelzoo_trainer.zoo.rows.hdf5_format import VSL_FEATURES
from modelzoo_trainer.zoo.rows.interface import Array, Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.packing import Weighted, packed_rows
from modelzoo_trainer.zoo.rows.modes.sequences import (
    Piece,
    RegionRules,
    document_piece,
    tokenize,
)
from modelzoo_trainer.zoo.rows.modes.special_ids import require_eos, require_pad
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


class VslPretrainingMode:
    """Rows of whole documents, each with EOS; a long one is cut into pieces that lose no token.

    Args:
        settings: The settings of the run.
        tokenizer: Has an EOS token.

    Raises:
        ConfigError: If the tokenizer has no EOS token, or a setting is invalid.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | {"use_vsl", "min_sequence_len"}
    features = VSL_FEATURES
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos, self._pad = require_eos(tokenizer), require_pad(tokenizer)
        self._rules = RegionRules(settings, None)
        self._before = tokenizer.around()[0]
        self._shortest = settings.processing.min_sequence_len

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        named = [(one, document_piece(one, self._rules)) for one in documents]
        tokens = self._tokenized([piece for _, piece in named])
        sequences: list[Weighted] = []
        for (document, piece), sequence in zip(named, tokens, strict=True):
            if not piece.text.strip():
                stats.skip(document, "empty")
            elif len(sequence.ids) < max(2, self._shortest):
                stats.skip(document, "too short")
            else:
                sequences += cut(sequence, length)
        stats.sequences += len(sequences)
        return packed_rows(sequences, length, self._pad)

    def _tokenized(self, pieces: Sequence[Piece]) -> Iterator[Weighted]:
        """Yield the tokens of each document, with BOS if the tokenizer adds it, and EOS."""
        if all(place.weight for piece in pieces for place in piece.places):
            found = self._tokenizer.encode_batch(
                [piece.text for piece in pieces], add_special_tokens=False
            )
            for ids in found:
                whole = np.array([*self._before, *ids, self._eos], np.int32)
                yield Weighted(whole, np.ones(len(whole), np.int32))
            return
        for piece, one in zip(pieces, tokenize(pieces, self._tokenizer), strict=True):
            ends = piece.places[-1].weight if piece.places else 0
            yield Weighted(
                _framed(self._before, one.ids, self._eos),
                _framed([0] * len(self._before), one.weights, ends),
            )


def cut(sequence: Weighted, length: int) -> Iterator[Weighted]:
    """Yield pieces of at most `length` + 1 tokens; the last token of each begins the next one."""
    for start in range(0, len(sequence.ids) - 1, length):
        stop = start + length + 1
        yield Weighted(sequence.ids[start:stop], sequence.weights[start:stop])


def _framed(before: Sequence[int], inside: Array, after: int) -> Array:
    return np.concatenate([np.array(before, np.int32), inside, np.array([after], np.int32)])
