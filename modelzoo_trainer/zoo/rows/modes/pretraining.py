"""Mode `pretraining`: documents one after another, each ended by EOS, in rows of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import ClassVar

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, FEATURES
from modelzoo_trainer.zoo.rows.interface import Document, Rows, Stats, Tokens
from modelzoo_trainer.zoo.rows.modes.sequences import (
    Piece,
    RegionRules,
    document_piece,
    tokenize,
)
from modelzoo_trainer.zoo.rows.modes.special_ids import require_eos, require_pad
from modelzoo_trainer.zoo.rows.packing import Packer
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


class PretrainingMode:
    """Rows that documents fill without a gap, or rows of one document each.

    A document is: BOS if the tokenizer adds it, its tokens, EOS. Rows are cut every S tokens, and
    the label of the last one is the first token of the next row, so that every token but the first
    is predicted once. With `pack_sequences: false` the last row of each document is padded.

    Args:
        settings: The settings of the run.
        tokenizer: Has an EOS token.

    Raises:
        ConfigError: If the tokenizer has no EOS token, or a setting is not supported.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | frozenset(
        {
            "pack_sequences",
            "training_objective",
            "split_text_to_tokenize",
            "chunk_len_to_split",
            "remove_bos_in_chunks",
        }
    )
    features = FEATURES

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        dataset, processing = settings.dataset, settings.processing
        if processing.short_seq_prob:
            raise ConfigError(
                "processing.short_seq_prob is not supported in mode pretraining: it would drop "
                "tokens. Remove it."
            )
        self.is_packed = dataset.pack_sequences
        self._tokenizer = tokenizer
        self._eos, self._pad = require_eos(tokenizer), require_pad(tokenizer)
        self._min_length = processing.min_sequence_len
        self._piece = dataset.chunk_len_to_split if dataset.split_text_to_tokenize else None
        self._bos = tokenizer.around()[0]
        self._repeats_bos = bool(self._bos) and not dataset.remove_bos_in_chunks
        self._rules = RegionRules(settings, None)

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Tokens | Rows:
        """Return the tokens of documents, or their rows; see `interface.Mode`."""
        tokens = self._tokens(documents, stats)
        return tokens if self.is_packed else self._rows(tokens, length, stats)

    def _tokens(self, documents: Sequence[Document], stats: Stats) -> Tokens:
        pieces = [document_piece(document, self._rules) for document in documents]
        is_weighted = any(place.weight != 1 for piece in pieces for place in piece.places)
        found = self._weighted(pieces) if is_weighted else self._plain(pieces)
        ids: list[list[int]] = []
        weights: list[int] = []
        for document, (core, counted) in zip(documents, found, strict=True):
            if not core:
                stats.skip(document, "empty")
                ids.append([])
                continue
            ids.append([*self._bos, *core, self._eos])
            weights += [1] * len(self._bos) + counted + [counted[-1]] if is_weighted else []
        ends = np.fromiter(accumulate(map(len, ids)), np.int64, len(ids))
        flat = np.array([*chain.from_iterable(ids)], np.int32)
        return Tokens(flat, ends, np.array(weights, np.int32) if is_weighted else None)

    def _plain(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[int], list[int]]]:
        texts = [piece.text for piece in pieces]
        if self._piece is None:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            yield from ((ids, []) for ids in found)
            return
        for text in texts:
            starts = range(0, len(text), self._piece)
            cut = [text[start : start + self._piece] for start in starts]
            found = self._tokenizer.encode_batch(cut, add_special_tokens=False)
            between = self._bos if self._repeats_bos else []
            yield (
                [
                    *chain.from_iterable(
                        [*(between if i else []), *one] for i, one in enumerate(found)
                    )
                ],
                [],
            )

    def _weighted(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[int], list[int]]]:
        for one in tokenize(pieces, self._tokenizer):
            yield one.ids.tolist(), one.weights.tolist()

    def _rows(self, tokens: Tokens, length: int, stats: Stats) -> Rows:
        """Return rows of one document each."""
        made = []
        for start, stop in pairwise([0, *tokens.ends.tolist()]):
            packer = Packer(length, self._pad, self._min_length)
            weights = None if tokens.weights is None else tokens.weights[start:stop]
            full = packer.add(Tokens(tokens.ids[start:stop], tokens.ends[:0], weights))
            last, dropped = packer.finish()
            stats.tokens_dropped += dropped
            made += [full, last]
        data = [rows.arrays[DATASET] for rows in made]
        empty = np.empty((0, len(self.features), length), np.int32)
        lengths = [rows.lengths for rows in made]
        return Rows(
            {DATASET: np.concatenate([empty, *data])},
            np.concatenate([np.empty(0, np.int64), *lengths]),
        )
