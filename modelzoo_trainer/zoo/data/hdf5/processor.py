"""What data processors over HDF5 files have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions, open_dataset
from modelzoo_trainer.zoo.data.hdf5.files import lacking_h5py, missing_folders
from modelzoo_trainer.zoo.data.hdf5.rows import HDF5Rows, MappedRows
from modelzoo_trainer.zoo.data.hdf5.selection import Source
from modelzoo_trainer.zoo.data.processor import LoadingOptions
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_once, say_without_effect

_NO_EFFECT: Final = {
    "use_worker_cache": "files are read where they are",
    "vocab_size": "token ids are compared with the vocab_size of the model",
    "repeat": "epochs repeat until the loop ends",
    "use_multiple_workers": "num_workers decides",
    "shuffle_buffer": "shuffle puts all samples of all files into a random order",
    "max_sequence_length": "this processor reads whole samples, as long as they are in the files",
}
"""Arguments of published files that this package does not need, and why."""


class HDF5Processor(StreamProcessor):
    """Base class of data processors over the rows of HDF5 files.

    Constructors of subclasses call `begin`.
    """

    dataset: HDF5Rows | MappedRows

    def begin(
        self,
        sources: Sequence[Source],
        rows: RowOptions,
        options: LoadingOptions,
        *,
        pad_last: bool = False,
    ) -> None:
        """Open the dataset.

        Args:
            sources: The folders.
            rows: How samples are read.
            options: Batch size, order, workers.
            pad_last: Whether to fill the last batch of an epoch with padding rows.

        Raises:
            ConfigError: If the data cannot be read, or does not fit the arguments.
        """
        self.options = options
        self.pads = pad_last
        self.dataset, self.members = self.load(sources, rows)

    @event("load")
    def load(
        self, sources: Sequence[Source], rows: RowOptions
    ) -> tuple[HDF5Rows | MappedRows, list[Member]]:
        """Return the dataset, and how many samples of each source are in an epoch."""
        return open_dataset(sources, rows)


def say_ignored(owner: str, given: Mapping[str, Any]) -> None:
    """Log once which of the arguments have no effect.

    Args:
        owner: Name of the data processor.
        given: Arguments that are not at their default, by name.
    """
    say_without_effect(owner, given, _NO_EFFECT)


def lacks_of(sources: Iterable[Source]) -> list[str]:
    """Return what this machine lacks to read the sources; no file is opened."""
    lacks = [] if find_spec("h5py") else [lacking_h5py()]
    for source in sources:
        lacks += missing_folders(source.folders, source.argument)
    return lacks


def check_padding(owner: str, *, drop_last: bool, pad_last: bool, has_function: bool) -> None:
    """Check that padding rows can be made, and log if none will be.

    Raises:
        ConfigError: If a function makes the samples.
    """
    if not pad_last:
        return
    if has_function:
        raise ConfigError(
            f"{owner}: pad_last cannot be set together with dataset_map_fn, whose samples have no "
            f"padding. Remove one of them."
        )
    if drop_last:
        say_once(
            f"{owner}.pad_last has no effect: with drop_last, all batches are full. Set drop_last: "
            f"false to fill the last batch of each epoch."
        )
