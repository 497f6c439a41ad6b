"""Objective `fim`: parts of documents are moved, so that a model learns to fill in the middle.

PSM: prefix, suffix, middle. SPM: suffix, prefix, middle. https://arxiv.org/abs/2207.14255
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.hdf5_format import FEATURES
from modelzoo_trainer.zoo.rows.interface import Array, Document, Rows, Stats
from modelzoo_trainer.zoo.rows.modes.packing import Weighted, single_rows
from modelzoo_trainer.zoo.rows.modes.sequences import RegionRules, document_piece
from modelzoo_trainer.zoo.rows.modes.special_ids import require_eos, require_pad, require_token
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer

_REPLACEMENT: Final = "\ufffd"
"""What incomplete characters are decoded to."""


@dataclass(slots=True)
class _Piece:
    """A document of a row, or what of it is in the row."""

    frame: list[list[int]]
    """What is around the three parts: before each one, and after the last."""
    parts: list[list[int]]
    """In the order in which they are written."""
    trims: list[tuple[int, bool]]
    """Which part is shortened first, and whether at its end."""

    def ids(self) -> list[int]:
        """Return the tokens."""
        found = list(self.frame[0])
        for part, after in zip(self.parts, self.frame[1:], strict=True):
            found += part + after
        return found

    def shorten(self) -> bool:
        """Remove a token; return whether there was one."""
        for index, at_end in self.trims:
            if self.parts[index]:
                self.parts[index].pop(-1 if at_end else 0)
                return True
        return False


class FillInTheMiddleMode:
    """Rows of documents one after the other; some documents are rearranged within their row.

    The documents of a unit of the input are packed; the last row of a unit is padded. A document
    that becomes longer loses the end of its suffix, then the start of its prefix.

    Args:
        settings: The settings of the run.
        tokenizer: Has an EOS token and the three tokens of `fim_*_tok`.

    Raises:
        ConfigError: If a rate or token is missing.
    """

    uses: ClassVar[frozenset[str]] = RegionRules.uses | {
        "training_objective",
        "fim_rate",
        "spm_rate",
        "fim_prefix_tok",
        "fim_middle_tok",
        "fim_suffix_tok",
        "min_sequence_len",
        "seed",
    }
    features = FEATURES
    is_packed = False

    def __init__(self, settings: PreprocessingSettings, tokenizer: Tokenizer) -> None:
        dataset, processing = settings.dataset, settings.processing
        self._tokenizer = tokenizer
        self._eos, self._pad = require_eos(tokenizer), require_pad(tokenizer)
        self._before = tokenizer.around()[0]
        self._rules = RegionRules(settings, None)
        self._shortest, self._seed = processing.min_sequence_len, processing.seed
        if dataset.fim_rate is None or dataset.spm_rate is None:
            raise ConfigError("training_objective fim needs dataset.fim_rate and dataset.spm_rate.")
        self._fim_rate, self._spm_rate = dataset.fim_rate, dataset.spm_rate
        self._prefix, self._middle, self._suffix = (
            require_token(tokenizer, getattr(dataset, key), f"dataset.{key}")
            for key in ("fim_prefix_tok", "fim_middle_tok", "fim_suffix_tok")
        )

    def encode(self, documents: Sequence[Document], length: int, stats: Stats) -> Rows:
        """Return the rows of documents; see `Mode`."""
        texts = [document_piece(document, self._rules).text for document in documents]
        stream: list[int] = []
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for document, text, ids in zip(documents, texts, found, strict=True):
            if not text.strip():
                stats.skip(document, "empty")
            else:
                stream += [*self._before, *ids, self._eos]
        sequences = []
        for number, start in enumerate(range(0, len(stream) - 1, length)):
            ids = stream[start : start + length + 1]
            if len(ids) >= max(2, self._shortest):
                draw = random.Random(documents[0].hash(self._seed) + number)
                sequences.append(self._rearranged(ids, length + 1, draw))
        return single_rows(sequences, length, self._pad)

    def _rearranged(self, ids: list[int], size: int, draw: random.Random) -> Weighted:
        pieces = [self._piece(one, draw) for one in _split_after(ids, self._eos)]
        excess = sum(len(piece.ids()) for piece in pieces) - size
        movable = [piece for piece in pieces if piece.trims]
        while excess > 0 and movable:
            for piece in list(movable):
                if excess > 0 and piece.shorten():
                    excess -= 1
                elif excess > 0:
                    movable.remove(piece)
        whole = [token for piece in pieces for token in piece.ids()][:size]
        return Weighted(np.array(whole, np.int32), np.ones(len(whole), np.int32))

    def _piece(self, ids: list[int], draw: random.Random) -> _Piece:
        before = len(self._before) if ids[: len(self._before)] == self._before else 0
        is_whole = ids[-1] == self._eos
        inside = ids[before : len(ids) - is_whole]
        if not inside or draw.random() >= self._fim_rate:
            return _Piece([ids], [], [])
        prefix, middle, suffix = self._three_parts(inside, draw)
        start, eos = ids[:before], [self._eos]
        if draw.random() < self._spm_rate:
            frame = [[*start, self._prefix, self._suffix], [self._middle], [], eos]
            return _Piece(frame, [suffix, prefix, middle], [(0, True), (1, False), (2, False)])
        frame = [[*start, self._prefix], [self._suffix], [self._middle], eos]
        return _Piece(frame, [prefix, suffix, middle], [(1, True), (0, False), (2, False)])

    def _three_parts(self, ids: list[int], draw: random.Random) -> list[list[int]]:
        """Return prefix, middle and suffix, cut at two random characters."""
        text = self._tokenizer.decode(ids)
        by_token = _REPLACEMENT in text  # an edge of the row lies inside a character
        size = len(ids) if by_token else len(text)
        first, second = sorted(draw.randrange(size + 1) for _ in range(2))
        if by_token:
            return [ids[:first], ids[first:second], ids[second:]]
        parts = [text[:first], text[first:second], text[second:]]
        return self._tokenizer.encode_batch(parts, add_special_tokens=False)


def _split_after(ids: list[int], mark: int) -> list[list[int]]:
    ends = np.flatnonzero(np.array(ids) == mark) + 1
    pieces: list[Array] = np.split(np.array(ids), ends)
    return [piece.tolist() for piece in pieces if len(piece)]
