"""Rows of texts with a class each, for models that classify sequences.

Dimension letters: N rows, F features, S positions, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature
from modelzoo_trainer.zoo.data.hugging_face.encoding import EncodingSettings, Rows, identity_of
from modelzoo_trainer.zoo.rows.hdf5_format import INPUTS, LABELS, MASK, SEGMENTS
from modelzoo_trainer.zoo.rows.interface import Document, Stats
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer

_MOST: Final = 2**15


class ClassEncoding:
    """Rows of a text, or of two, and the class in `labels`.

    The tokenizer adds what it puts around texts; those that are too long lose their end.

    Args:
        settings: The settings of the data processor.
        tokenizer: Has a token that fills rows.
        where: The dataset, for messages.
    """

    def __init__(self, settings: EncodingSettings, tokenizer: Tokenizer, where: str) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._where = where
        self._engine = type(tokenizer.engine).from_str(tokenizer.engine.to_str())
        self._engine.enable_truncation(settings.max_sequence_length)
        self._has_pair = settings.columns.text_pair is not None
        middle = (SEGMENTS,) if self._has_pair else ()
        self.features: tuple[str, ...] = (INPUTS, MASK, *middle, LABELS)
        assert tokenizer.pad_id is not None  # the data processor has checked it
        self.fill: tuple[int, ...] = (tokenizer.pad_id, *(0 for _ in self.features[1:]))
        self.largest = max(tokenizer.vocab_size - 1, _MOST)

    @property
    def identity(self) -> str:
        """See `Encoding`."""
        return identity_of(self._settings, self._tokenizer)

    def rows(self, examples: Sequence[Mapping[str, Any]], first: int, stats: Stats) -> Rows:
        """Return a row for each example; see `Encoding`.

        Raises:
            ConfigError: If a text or a class cannot be used, with the number of its row.
        """
        data = np.zeros(
            (len(examples), len(self.features), self._settings.max_sequence_length), np.int32
        )
        data[:, 0] = self.fill[0]
        texts = []
        for number, example in enumerate(examples):
            try:
                texts.append(self._texts(example))
                data[number, -1, 0] = self._class(example)
            except ConfigError as error:
                where = Document(self._where, first + number, []).where
                raise ConfigError(f"{where}: {error}") from error
        for row, found in zip(data, self._engine.encode_batch(texts), strict=True):
            row[0, : len(found.ids)] = found.ids
            row[1, : len(found.ids)] = 1
            if self._has_pair:
                row[2, : len(found.ids)] = found.type_ids
            stats.documents_truncated += bool(found.overflowing)
        stats.documents += len(examples)
        stats.rows += len(examples)
        return data

    def batch(self, rows: Any, names: Sequence[str]) -> Batch:
        """Return the batch of rows; `labels` is (B,) int64."""
        found = by_feature(rows, names)
        found[LABELS] = found[LABELS][:, 0].long()
        return found

    def _texts(self, example: Mapping[str, Any]) -> str | tuple[str, ...]:
        columns = self._settings.columns
        names = [columns.text, *([] if columns.text_pair is None else [columns.text_pair])]
        for name in names:
            if not isinstance(example[name], str):
                kind = type(example[name]).__name__
                raise ConfigError(
                    f"column {name!r} must have a text, got {kind}. Remove the row, or give it one."
                )
        texts = tuple(example[name] for name in names)
        return texts if self._has_pair else texts[0]

    def _class(self, example: Mapping[str, Any]) -> int:
        column, names = self._settings.columns.label, self._settings.label_names
        value = example[column]
        if isinstance(value, str):
            if names is None:
                raise ConfigError(
                    f"column {column!r} has the class {value!r} as text. Set label_names to all "
                    f"classes, in the order of their numbers."
                )
            if value not in names:
                raise ConfigError(
                    f"column {column!r} has the class {value!r}, which label_names lacks. "
                    f"{suggest(value, names)}"
                )
            return names.index(value)
        most = _MOST if names is None else len(names)
        if not isinstance(value, int) or not 0 <= value < most:
            raise ConfigError(
                f"column {column!r} must have a class from 0 to {most - 1}, got {value!r}. Remove "
                f"the row, or number the classes so."
            )
        return int(value)
