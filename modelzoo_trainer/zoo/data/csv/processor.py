"""What data processors over CSV files have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.csv.files import CsvFile, find_files, missing_folders
from modelzoo_trainer.zoo.data.csv.rows import CsvRows
from modelzoo_trainer.zoo.data.folders import distinct_folders
from modelzoo_trainer.zoo.data.processor import LoadingOptions
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_without_effect

_NO_EFFECT: Final = {
    "buckets": "all samples are padded to one length",
    "num_examples": "it follows from the files",
    "steps": "the loop decides",
    "whole_word_masking": "this processor has no such setting, see mask_whole_word",
    "vocab_size": "token ids are compared with the vocab_size of the model",
    "shuffle_buffer": "shuffle puts all samples of all files into a random order",
}
"""Arguments of published files that this package does not need, and why."""


class CsvProcessor(StreamProcessor):
    """Base class of data processors over the rows of CSV files.

    Constructors of subclasses call `begin`.
    """

    dataset: CsvRows

    def begin(self, data_dir: str | list[str], options: LoadingOptions) -> None:
        """Open the dataset.

        Raises:
            ConfigError: If the files cannot be read.
        """
        self.options = options
        self.dataset = self.load(folders_of(data_dir))
        self.members = [Member(0, len(self.dataset), len(self.dataset))]

    @event("load")
    def load(self, folders: Sequence[str]) -> CsvRows:
        """Return the dataset of the files of folders."""
        return self.make_dataset(self.find_files(folders))

    def find_files(self, folders: Sequence[str]) -> list[CsvFile]:
        """Return the files of folders, here those that `meta.dat` lists."""
        return find_files(folders)

    def make_dataset(self, files: Sequence[CsvFile]) -> CsvRows:
        """Return the dataset of files."""
        raise NotImplementedError


def folders_of(data_dir: str | list[str]) -> tuple[str, ...]:
    """Return the folders that `data_dir` names.

    Raises:
        ConfigError: If it names none, or one twice.
    """
    return distinct_folders(data_dir, "data_dir")


def lacks_of(data_dir: str | list[str]) -> list[str]:
    """Return what this machine lacks to read the folders; no file is opened."""
    return missing_folders(folders_of(data_dir))


def say_ignored(owner: str, given: Mapping[str, Any], reason: str = "") -> None:
    """Log once which of the arguments have no effect.

    Args:
        owner: Name of the data processor.
        given: Arguments that are not at their default, by name.
        reason: Why; "" = the general reason of each.
    """
    reasons = dict.fromkeys(given, reason) if reason else _NO_EFFECT
    say_without_effect(owner, given, reasons)
