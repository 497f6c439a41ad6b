"""What data processors over HDF5 files have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.data.hdf5.dataset import RowOptions, open_dataset
from modelzoo_trainer.data.hdf5.files import lacking_h5py, missing_folders
from modelzoo_trainer.data.hdf5.rows import HDF5Rows, MappedRows
from modelzoo_trainer.data.hdf5.selection import Source
from modelzoo_trainer.data.processor import DataProcessor, LoadingOptions, already_a_batch
from modelzoo_trainer.data.stream import Member, StreamSampler
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.interceptors import event

log = logging.getLogger("modelzoo_trainer.data")

_SAID: Final[set[str]] = set()
_NO_EFFECT: Final = {
    "use_worker_cache": "files are read where they are",
    "vocab_size": "token ids are compared with the vocab_size of the model",
    "repeat": "epochs repeat until the loop ends",
    "use_multiple_workers": "num_workers decides",
    "shuffle_buffer": "shuffle puts all samples of all files into a random order",
    "max_sequence_length": "this processor reads whole samples, as long as they are in the files",
}
"""Arguments of published files that this package does not need, and why."""


class HDF5Processor(DataProcessor):
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
        self._pads = pad_last
        self.dataset, self.members = self.load(sources, rows)

    @event("load")
    def load(
        self, sources: Sequence[Source], rows: RowOptions
    ) -> tuple[HDF5Rows | MappedRows, list[Member]]:
        """Return the dataset, and how many samples of each source are in an epoch."""
        return open_dataset(sources, rows)

    @event("create-dataloader")
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of batches of all processes, of which each takes its slice."""
        options = self.options
        sampler = StreamSampler(
            self.members,
            batch_size=options.num_drawn,
            shuffle=options.shuffle,
            seed=options.shuffle_seed,
            carries=options.drop_last,
            pads=self._pads,
        )
        if options.drop_last:
            self._say_what_is_carried(sampler)
        has_workers = options.num_workers > 0
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_size=options.num_drawn,
            sampler=sampler,
            num_workers=options.num_workers,
            collate_fn=already_a_batch,
            prefetch_factor=options.prefetch_factor if has_workers else None,
            persistent_workers=options.persistent_workers and has_workers,
            generator=torch.Generator().manual_seed(options.shuffle_seed),
        )
        loader.is_global_batch = True  # each process takes a slice
        return loader

    def _say_what_is_carried(self, sampler: StreamSampler) -> None:
        num, size, owner = sampler.num_samples, sampler.batch_size, type(self).__name__
        if num < size:
            say_once(f"{owner}: a batch of {size} samples repeats some of the {num} samples.")
        elif num % size:
            say_once(
                f"{owner}: an epoch is {sampler.num_batches} batches of {size} samples, "
                f"{len(sampler)} of {num}. No sample is lost: each epoch begins where the one "
                f"before it ended."
            )


def say_once(text: str) -> None:
    """Log a notice, in a process once: a dataloader is created for each validation."""
    if text not in _SAID:
        _SAID.add(text)
        log.info(text)


def say_ignored(owner: str, given: Mapping[str, Any]) -> None:
    """Log once which of the arguments have no effect.

    Args:
        owner: Name of the data processor.
        given: Arguments that are not at their default, by name.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            say_once(f"{owner}.{name} has no effect: {_NO_EFFECT[name]}.")


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
