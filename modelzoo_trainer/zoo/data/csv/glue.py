"""Classes of sentences and of pairs of them, from TSV files as GLUE has them.

https://gluebenchmark.com

Dimension letters: B batch, S length of a sequence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

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
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.files import CsvFile, CsvFiles, Ints, whole_file
from modelzoo_trainer.zoo.data.csv.pretraining_rows import check_length
from modelzoo_trainer.zoo.data.csv.processor import CsvProcessor, folders_of
from modelzoo_trainer.zoo.data.csv.rows import Arrays, CsvRows, check_pad
from modelzoo_trainer.zoo.data.csv.word_pieces import WordPieces, missing_library
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary

_SHORTEST: Final = 5  # tokens: [CLS], [SEP] and a piece of each sentence


class SentenceRows(CsvRows):
    """Sentences, or pairs of them, and their labels.

    Args:
        files: The files.
        columns: Of the sentences, then of the label.
        vocabulary: The ids of pieces.
        pieces: Cuts text.
        length: Tokens of a sequence, S.
        labels: Numbers of the labels by their names in the files.
        pads: Values of `input_ids` and `attention_mask` after the end of a sequence.
        subsets: Keys of a batch that say which file a row is of, in the order of the files; none
            if empty.
    """

    def __init__(
        self,
        files: Sequence[CsvFile],
        columns: Sequence[str],
        *,
        vocabulary: Vocabulary,
        pieces: WordPieces,
        length: int,
        labels: Mapping[str, int],
        pads: tuple[int, int],
        subsets: Sequence[str] = (),
    ) -> None:
        advice = "Use the files of the task as GLUE has them."
        found = CsvFiles(files, columns, delimiter="\t", quotes=False, advice=advice)
        super().__init__(found)
        self._vocabulary, self._pieces, self._length = vocabulary, pieces, length
        self._labels, self._pads, self._subsets = labels, pads, tuple(subsets)

    @property
    @override
    def settings(self) -> tuple[object, ...]:
        return (
            *(self.files.columns, self._vocabulary.settings, self._pieces.lowercase),
            *(self._length, sorted(self._labels.items()), self._pads, self._subsets),
        )

    def follow_model(self, model: Any) -> None:
        """Check that the model has all labels.

        Raises:
            ConfigError: If not.
        """
        num = getattr(model, "num_labels", None)
        kind = getattr(model, "problem_type", "single_label_classification")
        if kind == "single_label_classification" and num is not None and num < len(self._labels):
            raise ConfigError(
                f"The data has {len(self._labels)} labels ({', '.join(self._labels)}), but "
                f"num_labels of the model is {num}. Set it to {len(self._labels)}."
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
        inputs, mask = (np.full(size, pad, np.int32) for pad in self._pads)
        segments = np.zeros(size, np.int32)
        labels = np.zeros(len(rows), np.int32)
        for number, (*texts, label) in enumerate(cells):
            ids, num_first = self._pieces.encode(texts, self._length)
            inputs[number, : len(ids)] = ids
            mask[number, : len(ids)] = 1
            segments[number, num_first : len(ids)] = 1
            labels[number] = self._number(label, int(rows[number]))
        batch: Arrays = {
            "input_ids": inputs,
            "attention_mask": mask,
            "token_type_ids": segments,
            "labels": labels,
        }
        numbers = self.files.numbers_of(rows) % max(1, len(self._subsets))
        return batch | {
            key: (numbers == number).astype(np.int32) for number, key in enumerate(self._subsets)
        }

    def _number(self, label: str, row: int) -> int:
        found = self._labels.get(label.strip())
        if found is None:
            raise self.refused(row, f"the label is {label!r}, expected {', '.join(self._labels)}.")
        return found


@checked_dataclass(kw_only=True)
class GlueProcessor(CsvProcessor):
    """Base class of the processors of tasks.

    Subclasses set the columns, the labels, and the files of training and validation.

    Args:
        vocab_file: Text file of the pieces of words, one a line, in the order of their ids.
        do_lower: Whether text is put into lower case, without accents.
        attn_mask_pad_id: Value of `attention_mask` there.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[Mapping[str, int]] = {}
    train_files: ClassVar[tuple[str, ...]] = ("train.tsv",)
    val_files: ClassVar[tuple[str, ...]] = ("dev.tsv",)
    val_subsets: ClassVar[tuple[str, ...]] = ()

    model_lengths = LENGTH
    is_training: Flag
    vocab_file: Name
    max_sequence_length: Size | None = None
    do_lower: Flag = False
    input_pad_id: NonNegativeSize = 0
    attn_mask_pad_id: NonNegativeSize = 0
    labels_pad_id: Any = without_effect("a sequence has one label")

    def __post_init__(self) -> None:
        owner = type(self).__name__
        length = given_or_model_length(self.max_sequence_length, "max_sequence_length", owner)
        if length < _SHORTEST:
            raise ConfigError(
                f"{owner}: max_sequence_length is {length}, but must be at least "
                f"{_SHORTEST}: [CLS], [SEP] and a token of each sentence."
            )
        vocabulary = Vocabulary(self.vocab_file)
        self._rows: dict[str, Any] = {
            "vocabulary": vocabulary,
            "pieces": WordPieces(vocabulary, lowercase=self.do_lower),
            "length": length,
            "labels": self.labels,
            "pads": (self.input_pad_id, self.attn_mask_pad_id),
            "subsets": () if self.is_training else self.val_subsets,
        }
        self.begin()

    @override
    def find_files(self, folders: Sequence[str]) -> list[CsvFile]:
        """Return the files of the task in each folder."""
        names = self._names()
        if problems := _missing(folders, names):
            raise ConfigError(problems[0])
        found = [
            whole_file(os.path.join(folder, name), delimiter="\t", quotes=False)
            for folder in folders
            for name in names
        ]
        if empty := next((one for one in found if not one.num_rows), None):
            raise ConfigError(f"{empty.path}: the file has no rows after its header. Add data.")
        return found

    @override
    def sample_features(self, model: Any) -> Features:
        names = ("input_ids", "attention_mask", "token_type_ids")
        found = rows_of(names, length_without_data(self, model)) | {"labels": Feature(())}
        return found | {key: Feature(()) for key in (() if self.is_training else self.val_subsets)}

    @override
    def make_dataset(self, files: Sequence[CsvFile]) -> SentenceRows:
        """Return the dataset of files."""
        return SentenceRows(files, self.columns, **self._rows)

    def _names(self) -> tuple[str, ...]:
        return self.train_files if self.is_training else self.val_files

    @override
    def missing(self) -> list[str]:
        lacks = _missing(folders_of(self.data_dir), self._names())
        return lacks + missing_vocabulary(self.vocab_file) + missing_library("vocab_file")


class SST2DataProcessor(GlueProcessor):
    """Load batches of sentences that are negative (0) or positive (1), for `bert/classifier`.

    Folders have `train.tsv` and `dev.tsv` with a header. The columns `sentence` and
    `label` are read; nothing is quoted.

    Args:
        batch_size: Sentences per batch over all processes, a multiple of their number.
        is_training: Whether to read `train.tsv`, or `dev.tsv`.
        max_sequence_length: Tokens per sentence with `[CLS]` and `[SEP]`: shorter ones are padded,
            longer ones cut; default: `max_position_embeddings` of the model.
        input_pad_id: Value of `input_ids` after the end of a sentence.

    Shapes:
        A batch: input_ids, attention_mask, token_type_ids (B, S); labels (B,); int32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    columns: ClassVar[tuple[str, ...]] = ("sentence", "label")
    labels: ClassVar[Mapping[str, int]] = {"0": 0, "1": 1}


class MNLIDataProcessor(GlueProcessor):
    """Load batches of pairs of sentences that follow or contradict, for `bert/classifier`.

    Folders have `train.tsv`, `dev_matched.tsv` and `dev_mismatched.tsv` with a header. The
    columns `sentence1`, `sentence2` and `gold_label` are read; nothing is quoted. Labels are
    entailment (0), neutral (1) and contradiction (2).

    Args:
        batch_size: Pairs per batch over all processes, a multiple of their number.
        is_training: Whether to read `train.tsv`, or `dev_matched.tsv` and after it
            `dev_mismatched.tsv`.
        max_sequence_length: Tokens per pair with `[CLS]` and two `[SEP]`: shorter ones are padded;
            of longer ones, the longer sentence is cut; default: `max_position_embeddings` of the
            model.
        input_pad_id: Value of `input_ids` after the end of a pair.

    Shapes:
        A batch: input_ids, attention_mask, token_type_ids (1 for the second sentence) (B, S);
        labels (B,); without `is_training` also is_matched and is_mismatched (B,), by the file that
        a row is of. All int32.

    Raises:
        ConfigError: If a file cannot be read, or does not fit the arguments or the model.
    """

    columns: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2", "gold_label")
    labels: ClassVar[Mapping[str, int]] = {"entailment": 0, "neutral": 1, "contradiction": 2}
    val_files: ClassVar[tuple[str, ...]] = ("dev_matched.tsv", "dev_mismatched.tsv")
    val_subsets: ClassVar[tuple[str, ...]] = ("is_matched", "is_mismatched")


def _missing(folders: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a message for each folder that has not these files; none is opened."""
    found = []
    for folder in folders:
        path = Path(folder).expanduser()
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            found.append(f"data_dir {folder!r} {problem}. Give a folder with {', '.join(names)}.")
            continue
        lacks = [name for name in names if not (path / name).is_file()]
        if lacks:
            found.append(f"data_dir {folder!r} has no file {', '.join(lacks)}. Add it.")
    return found
