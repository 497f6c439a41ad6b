"""Tokens with labels, such as of named entities, on CSV files.

Dimension letters: B batch, S length of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    Name,
    NonNegativeSize,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.core.parts.model_length import LENGTH, given_or_model_length
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.csv.files import CsvFile, CsvFiles, Ints
from modelzoo_trainer.zoo.data.csv.follow import followed
from modelzoo_trainer.zoo.data.csv.pretraining_rows import check_length
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor
from modelzoo_trainer.zoo.data.csv.rows import Arrays, CsvRows, check_pad
from modelzoo_trainer.zoo.data.sample_features import Features, length_without_data, rows_of
from modelzoo_trainer.zoo.data.stream_processor import ALL_ARE_SHUFFLED
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_PAD: Final = "[PAD]"
_LABEL_FILE: Final = "a JSON file with the number of each label"


class TokenLabelRows(CsvRows):
    """Tokens and their labels; what the processor does not set follows the model.

    Args:
        files: The files.
        vocabulary: The ids of tokens.
        length: Tokens of a sequence, S.
        owner: Name of the data processor.
        label_file: JSON file of the numbers of labels; None = the model's.
        includes_padding: Whether padding counts in the loss; None = as the model has it.
        pads: Values of `input_ids`, `attention_mask` and `labels` after the end of a sequence.
    """

    def __init__(
        self,
        files: Sequence[CsvFile],
        vocabulary: Vocabulary,
        *,
        length: int,
        owner: str,
        label_file: str | None,
        includes_padding: bool | None,
        pads: tuple[int, int, int],
    ) -> None:
        super().__init__(CsvFiles(files, ("tokens", "labels")))
        self._vocabulary, self._length, self._pads = vocabulary, length, pads
        self._owner, self._given = owner, (label_file, includes_padding)
        self._includes_padding = bool(includes_padding)
        self._labels = None if label_file is None else read_labels(label_file)

    @property
    @override
    def settings(self) -> tuple[object, ...]:
        labels = sorted((self._labels or {}).items())
        return (
            *(self._vocabulary.settings, labels, self._length, self._pads),
            self._includes_padding,
        )

    def follow_model(self, model: Any) -> None:
        """Take the settings of the model, unless the processor has its own.

        Raises:
            ConfigError: If a setting of both differs, or a label or `labels_pad_id` is no class of
                the model.
        """
        label_file, includes_padding = self._given
        own = followed(
            self._owner, "include_padding_in_loss", includes_padding, model, default=False
        )
        self._includes_padding = bool(own)
        path = followed(self._owner, "label_vocab_file", label_file, model, default=None)
        self._labels = None if path is None else read_labels(path)
        num_classes = getattr(model, "num_classes", None)
        check_pad(
            *("labels_pad_id", self._pads[2], num_classes, "num_classes"), may_be_ignored=True
        )
        highest = max((self._labels or {"": 0}).values())
        if num_classes is not None and highest >= num_classes:
            raise ConfigError(
                f"label_vocab_file {path!r} has the label number {highest}, but num_classes of "
                f"the model is {num_classes}. Increase it, or use the file of the model."
            )

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        self._vocabulary.check_model(vocab_size)
        check_length(self._length, max_position_embeddings)
        check_pad("input_pad_id", self._pads[0], vocab_size, "vocab_size")
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def make_batch(self, cells: list[list[str]], rows: Ints) -> Arrays:
        size = (len(rows), self._length)
        inputs, mask, labels = (np.full(size, pad, np.int32) for pad in self._pads)
        is_token = np.zeros(size, np.int32)
        for number, row in enumerate(rows.tolist()):
            tokens, names = (text.split() for text in cells[number])
            if len(tokens) != len(names):
                raise self.refused(row, f"there are {len(tokens)} tokens, but {len(names)} labels.")
            if len(tokens) > self._length:
                raise self.refused(
                    row,
                    f"there are {len(tokens)} tokens, but max_sequence_length is {self._length}. "
                    f"Increase it.",
                )
            inputs[number, : len(tokens)] = self._vocabulary.ids_of(tokens)
            labels[number, : len(tokens)] = self._numbers(names, row)
            mask[number, : len(tokens)] = is_token[number, : len(tokens)] = 1
        return {
            "input_ids": inputs,
            "attention_mask": mask,
            "loss_mask": np.ones_like(mask) if self._includes_padding else is_token,
            "token_type_ids": np.zeros_like(inputs),
            "labels": labels,
        }

    def _numbers(self, names: list[str], row: int) -> list[int]:
        if self._labels is None:
            raise ConfigError(
                f"{self._owner}: label_vocab_file is missing: a JSON file with the number of each "
                f"label. Set it in the model or in the data processor."
            )
        if lacks := [name for name in names if name not in self._labels]:
            raise self.refused(
                row,
                f"the label {lacks[0]!r} is not in label_vocab_file, which has "
                f"{', '.join(self._labels)}.",
            )
        return [self._labels[name] for name in names]


def read_labels(path: str) -> dict[str, int]:
    """Return the numbers of labels, from a JSON file.

    Raises:
        ConfigError: If it cannot be read, or has anything else.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"label_vocab_file {path!r} cannot be read: {reason_of(error)}."
        ) from error
    numbers = found.values() if isinstance(found, dict) else [None]
    if not found or not all(type(one) is int and one >= 0 for one in numbers):
        raise ConfigError(
            f"label_vocab_file {path!r}: expected a mapping from labels to numbers >= 0."
        )
    labels: dict[str, int] = found
    return labels


@checked_dataclass(kw_only=True)
class BertTokenClassifierDataProcessor(CsvProcessor):
    """Load batches of tokens with labels from CSV files, for `bert/token_classifier`.

    Folders have a file `meta.dat` with a line for each CSV file: its name and its number of rows.
    The columns are `tokens` and `labels`, as many of them, with spaces between them.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        vocab_file: Text file of the tokens, one a line, in the order of their ids.
        max_sequence_length: Tokens per sequence: shorter ones are padded, longer ones
            refused; default: `max_position_embeddings` of the model.
        label_vocab_file: JSON file with the number of each label; null = the model's.
        include_padding_in_loss: Whether padding counts in the loss; null = as the model has it.
        do_lower: Whether tokens that the vocabulary lacks are looked up in lower case.
        labels_pad_id: Value of `labels` after the end of a sequence; null = 0.
        input_pad_id: Value of `input_ids` there; null = the id of `[PAD]`, 0 without it.
        attn_mask_pad_id: Value of `attention_mask` there; null = 0.

    Shapes:
        A batch: input_ids, attention_mask, loss_mask, token_type_ids (0) and labels (B, S), int32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    model_lengths = LENGTH
    vocab_file: Name
    max_sequence_length: Size | None = None
    label_vocab_file: str | None = None
    include_padding_in_loss: bool | None = None
    do_lower: Flag = False
    labels_pad_id: int | None = None
    input_pad_id: NonNegativeSize | None = None
    attn_mask_pad_id: NonNegativeSize | None = None
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    mask_whole_word: Any = without_effect("no token is hidden")

    def __post_init__(self) -> None:
        owner = type(self).__name__
        vocabulary = Vocabulary(
            self.vocab_file, case="lower_if_missing" if self.do_lower else "counts"
        )
        pad = self.input_pad_id
        pad = min(vocabulary.find([_PAD]), default=0) if pad is None else pad
        self._vocabulary = vocabulary
        self._rows: dict[str, Any] = {
            "length": given_or_model_length(self.max_sequence_length, "max_sequence_length", owner),
            "owner": owner,
            "label_file": self.label_vocab_file,
            "includes_padding": self.include_padding_in_loss,
            "pads": (pad, self.attn_mask_pad_id or 0, self.labels_pad_id or 0),
        }
        self.begin()

    @override
    def sample_features(self, model: Any) -> Features:
        names = ("input_ids", "attention_mask", "loss_mask", "token_type_ids", "labels")
        return rows_of(names, length_without_data(self, model))

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> TokenLabelRows:
        """Return the dataset of files."""
        return TokenLabelRows(files, self._vocabulary, **self._rows)

    @override
    def missing(self) -> list[str]:
        lacks = super().missing() + missing_vocabulary(self.vocab_file)
        if self.label_vocab_file is not None:
            lacks += missing_vocabulary(self.label_vocab_file, "label_vocab_file", _LABEL_FILE)
        return lacks
