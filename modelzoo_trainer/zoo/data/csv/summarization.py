"""Extractive summarization on CSV files.

Dimension letters: B batch, S length of a document, C sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    NonNegativeSize,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.zoo.data.csv.files import CsvFile, CsvFiles, Ints
from modelzoo_trainer.zoo.data.csv.pretraining_rows import check_length
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor
from modelzoo_trainer.zoo.data.csv.rows import Arrays, CsvRows, check_pad, integers
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.stream_processor import ALL_ARE_SHUFFLED

_TOKEN_IDS: Final = "the files have token ids"
_COLUMNS: Final = ("input_ids", "labels", "token_type_ids", "cls_indices")


class SummarizationRows(CsvRows):
    """Documents whose sentences have labels.

    Args:
        files: The files; their columns are read by their order.
        length: Tokens of a document, S.
        num_sentences: Sentences of a document, C.
        pad: Token after the end of a document.
    """

    def __init__(
        self, files: Sequence[CsvFile], *, length: int, num_sentences: int, pad: int
    ) -> None:
        super().__init__(CsvFiles(files, ()))
        self._length, self._num, self._pad = length, num_sentences, pad
        self._vocab_size: int | None = None
        self._num_labels: int | None = None
        self._num_segments = 2

    @property
    @override
    def settings(self) -> tuple[object, ...]:
        return self._length, self._num, self._pad

    def follow_model(self, model: Any) -> None:
        """Take the numbers of labels and segments of the model, to check rows."""
        self._num_labels = getattr(model, "num_labels", None)
        self._num_segments = getattr(model, "num_segments", None) or self._num_segments

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        check_length(self._length, max_position_embeddings)
        check_pad("pad_id", self._pad, vocab_size, "vocab_size")
        self._vocab_size = vocab_size
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def make_batch(self, cells: list[list[str]], rows: Ints) -> Arrays:
        size, num = (len(rows), self._length), (len(rows), self._num)
        inputs = np.full(size, self._pad, np.int32)
        segments, mask = np.zeros((2, *size), np.int32)
        labels, places = np.zeros((2, *num), np.int32)
        weights = np.zeros(num, np.float32)
        for number, row in enumerate(rows.tolist()):
            found = self._lists(cells[number], row)
            ids = found["input_ids"][: self._length]
            inputs[number, : len(ids)] = ids
            mask[number, : len(ids)] = ids != self._pad
            kinds = found["token_type_ids"][: self._length]
            segments[number, : len(kinds)] = kinds
            # Of a document that is cut, the sentences that still begin in it.
            starts = found["cls_indices"]
            is_there = starts < len(ids)
            starts, given = starts[is_there], found["labels"][is_there]
            starts, given = starts[: self._num], given[: self._num]
            places[number, : len(starts)], labels[number, : len(starts)] = starts, given
            weights[number, : len(starts)] = 1
        return {
            "input_ids": inputs,
            "attention_mask": mask,
            "token_type_ids": segments,
            "labels": labels,
            "cls_indices": places,
            "cls_weights": weights,
        }

    def _lists(self, cells: list[str], row: int) -> dict[str, Any]:
        if len(cells) < len(_COLUMNS):
            raise self.refused(
                row, f"there are {len(cells)} cells, expected {', '.join(_COLUMNS)}, in this order."
            )
        found: dict[str, Any] = {}
        for name, text in zip(_COLUMNS, cells, strict=False):
            values = integers(self.parse(text, name, row))
            if values is None or (values < 0).any():
                raise self.refused(row, f"{name} must be integers >= 0.")
            found[name] = values
        if len(found["labels"]) != len(found["cls_indices"]):
            raise self.refused(
                row,
                f"there are {len(found['labels'])} labels, but {len(found['cls_indices'])} "
                f"cls_indices.",
            )
        num = len(found["input_ids"])
        if len(found["token_type_ids"]) != num:
            raise self.refused(
                row, f"there are {len(found['token_type_ids'])} token_type_ids, but {num} tokens."
            )
        limits = (self._vocab_size, self._num_labels, self._num_segments, num)
        for name, limit in zip(_COLUMNS, limits, strict=True):
            self.check_limit(found[name], limit, name, row)
        return found


@checked_dataclass(kw_only=True)
class BertSumCSVDataProcessor(CsvProcessor):
    """Load batches of documents from CSV files, whose sentences belong to a summary or not.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    The first four columns, whatever their names, are lists of integers: token ids, labels of the
    sentences, segments of the tokens, positions of the tokens that begin a sentence.

    Args:
        batch_size: Documents per batch over all processes, a multiple of their number.
        max_sequence_length: Tokens per document: longer ones are cut, with their sentences;
            default: `max_position_embeddings` of the model.
        max_cls_tokens: Sentences per document, at most.
        pad_id: Token after the end of a document, which nothing sees; null = 0.

    Shapes:
        A batch: input_ids, attention_mask, token_type_ids (B, S), labels and cls_indices (B, C),
        int32; cls_weights (B, C), float32, 1 for each sentence.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    model_lengths = LENGTH
    max_sequence_length: Size | None = None
    max_cls_tokens: Size
    pad_id: NonNegativeSize | None = None
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    vocab_file: Any = without_effect(_TOKEN_IDS)
    do_lower: Any = without_effect(_TOKEN_IDS)
    mask_whole_word: Any = without_effect(_TOKEN_IDS)

    def __post_init__(self) -> None:
        self._length = given_or_model_length(
            self.max_sequence_length, "max_sequence_length", type(self).__name__
        )
        self.begin()

    @override
    def sample_features(self, model: Any) -> Features:
        length, num = length_without_data(self, model), self.max_cls_tokens
        found = rows_of(("input_ids", "attention_mask", "token_type_ids"), length)
        found |= rows_of(("labels", "cls_indices"), num)
        return found | {"cls_weights": Feature((num,), torch.float32)}

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> SummarizationRows:
        """Return the dataset of files."""
        return SummarizationRows(
            files,
            length=self._length,
            num_sentences=self.max_cls_tokens,
            pad=self.pad_id or 0,
        )
