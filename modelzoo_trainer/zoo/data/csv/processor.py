"""What data processors over CSV files have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from typing_extensions import override

from modelzoo_trainer.base.constraints import Flag, checked_dataclass
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.csv.files import CsvFile, find_files, missing_folders
from modelzoo_trainer.zoo.data.csv.rows import CsvRows
from modelzoo_trainer.zoo.data.folders import distinct_folders
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_without_effect


@checked_dataclass(kw_only=True)
class CsvProcessor(StreamProcessor):
    """Base class of data processors over the rows of CSV files.

    Constructors of subclasses call `begin`.

    Args:
        data_dir: One or a list of folders.
    """

    persistent_workers: Flag = True
    data_dir: str | list[str]
    dataset: CsvRows = field(init=False)

    def begin(self) -> None:
        """Open the dataset.

        Raises:
            ConfigError: If the files cannot be read.
        """
        say_without_effect(self)
        self.options = self.loading_options()
        self.dataset = self.load(folders_of(self.data_dir))
        self.members = [Member(0, len(self.dataset), len(self.dataset))]

    @override
    def missing(self) -> list[str]:
        return lacks_of(self.data_dir)

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
