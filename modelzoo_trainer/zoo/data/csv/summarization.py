"""Extractive summarization on CSV files.

Dimension letters: B batch, S length of a document, C sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from typing_extensions import override

from modelzoo_trainer.base.constraints import Flag, NonNegativeSize, PositiveInt, Size, checked
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.zoo.data.csv.files import CsvFile, CsvFiles, Ints
from modelzoo_trainer.zoo.data.csv.pretraining_rows import check_length
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor, lacks_of, say_ignored
from modelzoo_trainer.zoo.data.csv.rows import Arrays, CsvRows, check_pad, integers
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed

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


class BertSumCSVDataProcessor(CsvProcessor):
    """Load batches of documents from CSV files, whose sentences belong to a summary or not.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    The first four columns, whatever their names, are lists of integers: token ids, labels of the
    sentences, segments of the tokens, positions of the tokens that begin a sentence.

    Args:
        data_dir: One or a list of folders.
        batch_size: Documents per batch over all processes, a multiple of their number.
        max_sequence_length: Tokens per document: longer ones are cut, with their sentences;
            default: `max_position_embeddings` of the model.
        max_cls_tokens: Sentences per document, at most.
        pad_id: Token after the end of a document, which nothing sees; null = 0.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        vocab_file: No effect.
        do_lower: No effect.
        mask_whole_word: No effect.

    Shapes:
        A batch: input_ids, attention_mask, token_type_ids (B, S), labels and cls_indices (B, C),
        int32; cls_weights (B, C), float32, 1 for each sentence.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    model_lengths = LENGTH

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        max_sequence_length: Size | None = None,
        max_cls_tokens: Size,
        pad_id: NonNegativeSize | None = None,
        shuffle: Flag = True,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        vocab_file: Any = None,
        do_lower: Any = None,
        mask_whole_word: Any = None,
    ) -> None:
        owner = type(self).__name__
        say_ignored(owner, {"shuffle_buffer": shuffle_buffer})
        ignored = {
            "vocab_file": vocab_file,
            "do_lower": do_lower,
            "mask_whole_word": mask_whole_word,
        }
        say_ignored(owner, ignored, "the files have token ids")
        length = given_or_model_length(max_sequence_length, "max_sequence_length", owner)
        self._sizes = {"length": length, "num_sentences": max_cls_tokens}
        self._pad = pad_id or 0
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed or 0,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.begin(data_dir, options)

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> SummarizationRows:
        """Return the dataset of files."""
        return SummarizationRows(files, **self._sizes, pad=self._pad)

    @classmethod
    def check_arguments(cls, *, data_dir: str | list[str], **others: Any) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder.
        """
        return lacks_of(data_dir)
