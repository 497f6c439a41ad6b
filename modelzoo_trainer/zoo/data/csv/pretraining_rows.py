"""Batches for BERT's pretraining from CSV files, with masks made on the fly or before.

Dimension letters: B batch, S length of a sequence, P predicted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.files import CsvFile, CsvFiles, Ints
from modelzoo_trainer.zoo.data.csv.follow import followed
from modelzoo_trainer.zoo.data.csv.masking import Masked, Masking
from modelzoo_trainer.zoo.data.csv.rows import IGNORED_LABEL, Arrays, CsvRows, check_pad, integers
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary

_NUM_SEGMENTS, _NUM_CLASSES = 2, 2  # unless the model has other numbers
_ADVICE: Final = "Prepare the data again."


class PretrainingRows(CsvRows):
    """Base class: whether there are labels of the next sentence follows the model.

    Args:
        files: The files, for the columns of a run without and with the next sentence.
        columns: Columns of both kinds of run.
        pair_columns: Columns of a run that predicts the next sentence.
        owner: Name of the data processor.
        disable_nsp: Whether the next sentence is not predicted; None = as the model has it.
        seed: Of random numbers.
    """

    def __init__(
        self,
        files: Sequence[CsvFile],
        columns: Sequence[str],
        pair_columns: Sequence[str],
        *,
        owner: str,
        disable_nsp: bool | None,
        seed: int = 0,
    ) -> None:
        super().__init__(CsvFiles(files, columns, advice=_ADVICE), seed=seed)
        self._columns, self._pair_columns = tuple(columns), tuple(pair_columns)
        self._owner, self._given = owner, disable_nsp
        self.has_pairs = False
        self._num_segments, self._num_classes = _NUM_SEGMENTS, _NUM_CLASSES
        self._read_pairs(not disable_nsp)

    def follow_model(self, model: Any) -> None:
        """Take the setting of the model, unless the processor has its own.

        Raises:
            ConfigError: If they differ.
        """
        own = followed(self._owner, "disable_nsp", self._given, model, default=False)
        self._read_pairs(not own)
        self._num_segments = getattr(model, "num_segments", None) or _NUM_SEGMENTS
        self._num_classes = getattr(model, "num_classes", None) or _NUM_CLASSES

    def _read_pairs(self, has_pairs: bool) -> None:
        self.has_pairs = has_pairs
        advice = _ADVICE
        if has_pairs:
            advice = (
                "Set disable_nsp: true in the model if it is not to predict the next sentence, or "
                "prepare the data again."
            )
        columns = self._columns + (self._pair_columns if has_pairs else ())
        self.files = CsvFiles(self.files.files, columns, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicOptions:
    """How `DynamicMaskRows` makes batches.

    Args:
        vocabulary: The ids of tokens.
        masking: How tokens are hidden.
        length: Tokens of a sequence, S.
        gathers: Whether there are labels for the predicted positions alone.
        scales: Whether a batch has a scale of its loss.
        input_pad: Value of `input_ids` after the end of a sequence.
        mask_pad: Likewise of `attention_mask`.
        segment_pad: Likewise of `token_type_ids`.
        label_pad: Value of `labels` where nothing is predicted.
    """

    vocabulary: Vocabulary
    masking: Masking
    length: int
    gathers: bool
    scales: bool
    input_pad: int = 0
    mask_pad: int = 0
    segment_pad: int = 0
    label_pad: int = 0


class DynamicMaskRows(PretrainingRows):
    """Tokens of CSV files; each epoch hides others."""

    def __init__(self, files: Sequence[CsvFile], options: DynamicOptions, **more: Any) -> None:
        super().__init__(files, ("tokens",), ("segment_ids", "is_random_next"), **more)
        self.options = options

    @property
    @override
    def settings(self) -> tuple[object, ...]:
        options = self.options
        return (
            *(options.vocabulary.settings, options.masking.settings, self.has_pairs),
            *(options.length, options.gathers, options.scales),
            *(options.input_pad, options.mask_pad, options.segment_pad, options.label_pad),
        )

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        options = self.options
        options.vocabulary.check_model(vocab_size)
        check_length(options.length, max_position_embeddings)
        check_pad("input_pad_id", options.input_pad, vocab_size, "vocab_size")
        check_pad(
            *("labels_pad_id", options.label_pad, vocab_size, "vocab_size"), may_be_ignored=True
        )
        if self.has_pairs:
            check_pad("segment_pad_id", options.segment_pad, self._num_segments, "num_segments")
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def make_batch(self, cells: list[list[str]], rows: Ints) -> Arrays:
        options, size = self.options, (len(rows), self.options.length)
        inputs = np.full(size, options.input_pad, np.int32)
        mask = np.full(size, options.mask_pad, np.int32)
        width = options.masking.max_predictions if options.gathers else options.length
        labels = np.full((len(rows), width), options.label_pad, np.int32)
        weights, positions = np.zeros((2, len(rows), width), np.int32)
        for number, row in enumerate(rows.tolist()):
            masked = self._masked(cells[number][0], row)
            inputs[number, : len(masked.ids)] = masked.ids
            mask[number, : len(masked.ids)] = 1
            at: Any = slice(len(masked.labels)) if options.gathers else masked.positions
            labels[number, at], weights[number, at] = masked.labels, 1
            positions[number, at] = masked.positions
        batch: Arrays = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
        batch["masked_lm_mask"] = weights
        if options.gathers:
            batch["masked_lm_positions"] = positions
        if options.scales:
            batch["mlm_loss_scale"] = loss_scale(weights)
        return batch | self._pairs(cells, rows) if self.has_pairs else batch

    def _masked(self, text: str, row: int) -> Masked:
        options = self.options
        tokens = self.parse(text, "tokens", row)
        if not tokens or not all(isinstance(one, str) for one in tokens):
            raise self.refused(row, "tokens must be strings, at least one.")
        if len(tokens) > options.length:
            if self.has_pairs:  # the second sentence would be cut
                raise self.refused(
                    row,
                    f"there are {len(tokens)} tokens, but max_sequence_length is {options.length}. "
                    f"Increase it.",
                )
            tokens = tokens[: options.length]
        ids = options.vocabulary.ids_of(tokens)
        return options.masking.mask(tokens, ids, (self.seed, self.epoch, row))

    def _pairs(self, cells: list[list[str]], rows: Ints) -> Arrays:
        """Return the segments, and whether the second sentence is a random one."""
        segments = np.full((len(rows), self.options.length), self.options.segment_pad, np.int32)
        labels = np.zeros((len(rows), 1), np.int32)
        for number, row in enumerate(rows.tolist()):
            _, text, label = cells[number]
            found = integers(self.parse(text, "segment_ids", row))
            num = len(self.parse(cells[number][0], "tokens", row))
            if found is None or len(found) != num:
                raise self.refused(row, f"segment_ids must be integers, {num} as the tokens.")
            self.check_limit(found, self._num_segments, "segment_ids", row)
            segments[number, : len(found)] = found
            labels[number] = self._label(label, "is_random_next", row)
        return {"token_type_ids": segments, "next_sentence_label": labels}

    def _label(self, text: str, column: str, row: int) -> int:
        text = text.strip().strip("[]").strip().lower()
        names = {"true": 1, "false": 0}
        if text in names:
            return names[text]
        if not text.isdecimal():
            raise self.refused(row, f"{column} is {text!r}, expected 0 or 1.")
        self.check_limit([int(text)], self._num_classes, column, row)
        return int(text)


class StaticMaskRows(PretrainingRows):
    """Token ids of CSV files, hidden when the files were written.

    Raises:
        ConfigError: If the files differ in their columns, lack the weights of positions, or have
            two columns of weights.
    """

    def __init__(self, files: Sequence[CsvFile], *, scales: bool, **more: Any) -> None:
        self._names = {name: name for name in _REQUIRED}
        for column in CsvFiles(files, ()).common_columns(_OPTIONAL):
            self._names[column] = _OPTIONAL[column]
        weights = [column for column in self._names if _OPTIONAL.get(column) == "masked_lm_mask"]
        if len(weights) > 1:
            raise ConfigError(
                f"{files[0].path}: the header has {' and '.join(weights)}, which both say which "
                f"labels count. Remove one of them."
            )
        if _POSITIONS in self._names and not weights:
            raise ConfigError(
                f"{files[0].path}: the header has the column {_POSITIONS}, but not "
                f"masked_lm_weights, so labels that fill a row would be trained on. Add the "
                f"column: 1 for each label that counts, 0 for the others."
            )
        super().__init__(
            files, tuple(self._names), ("token_type_ids", "next_sentence_label"), **more
        )
        self._scales = scales
        self._limits: tuple[int | None, int | None] = (None, None)

    @property
    @override
    def settings(self) -> tuple[object, ...]:
        return self.files.columns, self._scales

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        self._limits = vocab_size, max_position_embeddings
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def make_batch(self, cells: list[list[str]], rows: Ints) -> Arrays:
        names = [*self._names.values(), *(self._pair_columns if self.has_pairs else ())]
        batch: Arrays = {
            name: self._column([one[place] for one in cells], self.files.columns[place], rows)
            for place, name in enumerate(names)
        }
        self._check(batch, rows)
        if self._scales:
            counts = (batch["labels"] != IGNORED_LABEL).astype(np.int32)
            batch["mlm_loss_scale"] = loss_scale(batch.get("masked_lm_mask", counts))
        return batch

    def _column(self, texts: list[str], column: str, rows: Ints) -> NDArray[np.int32]:
        """Return the lists of a column, (B, length); one of single numbers as (B, 1)."""
        found: list[NDArray[np.int32]] = []
        for text, row in zip(texts, rows.tolist(), strict=True):
            whole = text if text.lstrip().startswith("[") else f"[{text}]"
            values = integers(self.parse(whole, column, row))
            if values is None:
                raise self.refused(row, f"{column} must be a list of integers.")
            if found and len(values) != len(found[0]):
                raise self.refused(
                    row,
                    f"{column} has {len(values)} values, but other rows have {len(found[0])}. All "
                    f"rows must have equally many.",
                )
            found.append(values)
        return np.stack(found)

    def _check(self, batch: Arrays, rows: Ints) -> None:
        vocab_size, num_positions = self._limits
        inputs = batch["input_ids"]
        length = inputs.shape[1]
        if num_positions is not None and length > num_positions:
            raise self.refused(
                int(rows[0]),
                f"a sequence has {length} tokens, but the model's max_position_embeddings is "
                f"{num_positions}. Increase it.",
            )
        self._check_widths(batch, rows)
        labels = batch["labels"]
        values = batch | {"labels": np.where(labels == IGNORED_LABEL, 0, labels)}
        limits = {
            "input_ids": vocab_size,
            "attention_mask": 2,
            "labels": vocab_size,
            "masked_lm_positions": length,
            "token_type_ids": self._num_segments,
            "next_sentence_label": self._num_classes,
        }
        for name in [name for name in limits if name in batch]:
            for number, row in enumerate(rows.tolist()):
                self.check_limit(values[name][number], limits[name], name, row)

    def _check_widths(self, batch: Arrays, rows: Ints) -> None:
        length, num_labels = batch["input_ids"].shape[1], batch["labels"].shape[1]
        is_gathered = "masked_lm_positions" in batch
        widths = {
            "attention_mask": length,
            "token_type_ids": length,
            "labels": num_labels if is_gathered else length,
            "masked_lm_positions": num_labels,
            "masked_lm_mask": num_labels,
            "next_sentence_label": 1,
        }
        for name in [name for name in widths if name in batch]:
            if batch[name].shape[1] != widths[name]:
                raise self.refused(
                    int(rows[0]),
                    f"{name} has {batch[name].shape[1]} values, expected {widths[name]}.",
                )


_POSITIONS: Final = "masked_lm_positions"
_REQUIRED: Final = ("input_ids", "attention_mask", "labels")
_OPTIONAL: Final = {
    "masked_lm_weights": "masked_lm_mask",
    "masked_lm_mask": "masked_lm_mask",
    _POSITIONS: _POSITIONS,
}
"""Columns that files may have, and their names in a batch."""


def loss_scale(weights: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the sequences of a batch over its predicted tokens, for each sequence: (B, 1)."""
    scale = len(weights) / max(1, int(weights.sum()))
    return np.full((len(weights), 1), scale, np.float32)


def check_length(length: int, max_position_embeddings: int | None) -> None:
    """Check that a model has positions for sequences.

    Raises:
        ConfigError: If not.
    """
    if max_position_embeddings is not None and length > max_position_embeddings:
        raise ConfigError(
            f"max_sequence_length of the data is {length}, but the model's max_position_embeddings "
            f"is {max_position_embeddings}. Make them equal."
        )
