"""Objective `mlm`: some tokens of a document are hidden, and predicted from both sides."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, INPUTS, LABELS, MASK, POSITIONS, SPAN
from modelzoo_trainer.zoo.rows.interface import Array, Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.packing import pack, spans_and_positions
from modelzoo_trainer.zoo.rows.modes.sequences import RegionRules, document_piece
from modelzoo_trainer.zoo.rows.modes.special_ids import require_pad, require_token
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import SPECIAL, Tokenizer

_HIDDEN: Final = 0.8  # of the chosen tokens; half of the others are replaced by a random one
_REPLACED: Final = 0.9


class _Masked(NamedTuple):
    ids: list[int]
    positions: list[int]  # increasing
    labels: list[int]  # the tokens that were there


class MaskedMode:
    """Rows of one document each, cut to the length of a row, or of several with `use_vsl`.

    `labels` has `ignore_index` where nothing is predicted. With `mlm_with_gather` it has the
    predicted tokens alone, then their positions and 1 for each.

    Args:
        settings: The settings of the run.
        tokenizer: Has a mask token.

    Raises:
        ConfigError: If there is no mask token, or an excluded token is not in the vocabulary.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | {
        "training_objective",
        "use_vsl",
        "mlm_fraction",
        "mlm_with_gather",
        "ignore_index",
        "excluded_tokens",
        "min_sequence_len",
        "seed",
    }
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        dataset, processing = settings.dataset, settings.processing
        self._tokenizer = tokenizer
        self._pad = require_pad(tokenizer)
        self._mask = require_token(tokenizer, tokenizer.tokens.get("mask_token"), "mask_token")
        self._before, self._after = tokenizer.around()
        self._rules = RegionRules(settings, None)
        self._fraction = dataset.mlm_fraction
        self._gathers, self._ignored = dataset.mlm_with_gather, dataset.ignore_index
        self._is_vsl = dataset.use_vsl
        self._shortest, self._seed = processing.min_sequence_len, processing.seed
        self._special = _special_ids(tokenizer, dataset.excluded_tokens or ())
        self._replacements = [
            token for token in range(tokenizer.vocab_size) if token not in self._special
        ]
        if not self._replacements:
            raise ConfigError("dataset.excluded_tokens excludes every token of the vocabulary.")
        vsl = (SPAN, POSITIONS) if self._is_vsl else ()
        self.features = (INPUTS, MASK, *vsl)

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        texts = [document_piece(document, self._rules).text for document in documents]
        tokens = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        masked = []
        for document, text, ids in zip(documents, texts, tokens, strict=True):
            room = length - len(self._before) - len(self._after)
            whole = [*self._before, *ids[: max(0, room)], *self._after]
            if not text.strip():
                stats.skip(document, "empty")
            elif len(whole) < max(1, self._shortest):
                stats.skip(document, "too short")
            else:
                stats.documents_truncated += len(ids) > room
                masked.append(self._masked(whole, random.Random(document.hash(self._seed))))
        sizes = [len(one.ids) for one in masked]
        if self._is_vsl:
            stats.sequences += len(masked)
        bins = pack(sizes, length) if self._is_vsl else [[index] for index in range(len(masked))]
        return self._rows([[masked[index] for index in members] for members in bins], length)

    def _masked(self, ids: list[int], draw: random.Random) -> _Masked:
        """Return a document with some tokens hidden; 80 % of them masked, 10 % replaced."""
        maskable = [place for place, token in enumerate(ids) if token not in self._special]
        chosen = sorted(draw.sample(maskable, int(self._fraction * len(maskable))))
        hidden = list(ids)
        for place in chosen:
            share = draw.random()
            if share < _HIDDEN:
                hidden[place] = self._mask
            elif share < _REPLACED:
                hidden[place] = self._replacements[draw.randrange(len(self._replacements))]
        return _Masked(hidden, chosen, [ids[place] for place in chosen])

    def _rows(self, bins: list[list[_Masked]], length: int) -> Rows:
        data = np.zeros((len(bins), len(self.features), length), np.int32)
        data[:, 0] = self._pad
        width = math.ceil(self._fraction * length) if self._gathers else length
        labels = np.zeros((len(bins), 3 if self._gathers else 1, width), np.int32)
        labels[:, 0] = self._ignored
        lengths = np.zeros(len(bins), np.int64)
        for index, members in enumerate(bins):
            ids = [token for one in members for token in one.ids]
            data[index, 0, : len(ids)] = ids
            data[index, 1, : len(ids)] = 1
            if self._is_vsl:
                sizes = [len(one.ids) for one in members]
                data[index, 2:] = spans_and_positions(sizes, length)
            self._label(labels[index], members)
            lengths[index] = len(ids)
        return Rows({DATASET: data, LABELS: labels}, lengths)

    def _label(self, labels: Array, members: list[_Masked]) -> None:
        start, positions, tokens = 0, [], []
        for one in members:
            positions += [start + place for place in one.positions]
            tokens += one.labels
            start += len(one.ids)
        if not self._gathers:
            labels[0, positions] = tokens
            return
        labels[0, : len(tokens)] = tokens
        labels[1, : len(tokens)] = positions
        labels[2, : len(tokens)] = 1


def _special_ids(tokenizer: Tokenizer, excluded: Sequence[str]) -> frozenset[int]:
    """Return the tokens that are neither hidden nor drawn as replacements."""
    named = [tokenizer.special_id(name) for name in SPECIAL]
    listed = [require_token(tokenizer, token, "dataset.excluded_tokens") for token in excluded]
    found = [*named, *listed, tokenizer.eos_id, tokenizer.pad_id]
    return frozenset(token for token in found if token is not None)
