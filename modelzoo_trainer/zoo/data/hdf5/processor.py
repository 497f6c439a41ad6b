"""What data processors over HDF5 files have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from importlib.util import find_spec
from typing import Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    Names,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions, open_dataset
from modelzoo_trainer.zoo.data.hdf5.files import lacking_h5py, missing_folders
from modelzoo_trainer.zoo.data.hdf5.rows import HDF5Rows, MappedRows
from modelzoo_trainer.zoo.data.hdf5.selection import SampleSource, parse_sources
from modelzoo_trainer.zoo.data.processor import ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import (
    ALL_ARE_SHUFFLED,
    VOCAB_SIZE_IS_COMPARED,
    StreamProcessor,
    say_once,
    say_without_effect,
)


@checked_dataclass(kw_only=True)
class HDF5Processor(StreamProcessor):
    """Base class of data processors over the rows of HDF5 files.

    Constructors of subclasses call `begin`.

    Args:
        use_vsl: Whether samples have several documents each: 5 features, the last two of them
            `attention_span` and `position_ids`.
    """

    shuffle: Flag = False
    persistent_workers: Flag = True
    use_vsl: Flag = False
    vocab_size: Any = without_effect(VOCAB_SIZE_IS_COMPARED)
    dataset: HDF5Rows | MappedRows = field(init=False)

    def sources(self) -> list[SampleSource]:
        """Return the folders.

        Raises:
            ConfigError: If an argument that names them is invalid.
        """
        raise NotImplementedError

    def begin(self, rows: RowOptions) -> None:
        """Open the dataset; `rows`: how samples are read.

        Raises:
            ConfigError: If the data cannot be read, or does not fit the arguments.
        """
        say_without_effect(self)
        self.options = self.loading_options()
        self.dataset, self.members = self.load(self.sources(), rows)

    @event("load")
    def load(
        self, sources: Sequence[SampleSource], rows: RowOptions
    ) -> tuple[HDF5Rows | MappedRows, list[Member]]:
        """Return the dataset, and how many samples of each source are in an epoch."""
        return open_dataset(sources, rows)

    @override
    def missing(self) -> list[str]:
        lacks = [] if find_spec("h5py") else [lacking_h5py()]
        for source in self.sources():
            lacks += missing_folders(source.folders, source.argument)
        return lacks


@checked_dataclass(kw_only=True)
class FolderProcessor(HDF5Processor):
    """Base class of those that read all samples of folders.

    Args:
        data_dir: One or a list of folders with `.h5` files.
    """

    data_dir: str | list[str]
    shuffle_buffer: Size | None = without_effect(ALL_ARE_SHUFFLED)
    features_list: Names | None = None

    @override
    def sources(self) -> list[SampleSource]:
        return parse_sources(self.data_dir, None, None)


@checked_dataclass(kw_only=True)
class MixtureProcessor(HDF5Processor):
    """Base class of those that read a selection of folders, or mix several.

    Args:
        shuffle_seed: Seed of the order.
        data_dir: One or a list of folders with `.h5` files, which are read in the order of their
            paths; subfolders are not read. Give either this or `mixture`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`: each batch has
            samples of all, in the proportion of the weights over an epoch.
        data_subset: Fractions of the samples to use, such as `0.0-0.3,0.7-1.0`.
        num_samples: Samples per epoch; default: all, or as many as a mixture needs until its larger
            folders are used up.
        pad_last: Whether to fill it with rows that do not count; requires `drop_last: false`.
        sort_files: No effect: files are always sorted.
        dataset_map_fn: Not supported.
    """

    shuffle_seed: ShuffleSeed = 0
    data_dir: str | list[str] | None = None
    mixture: list[dict[str, Any]] | None = None
    data_subset: str | None = None
    num_samples: Size | None = None
    pad_last: Flag = False
    max_sequence_length: Size | None = None
    sort_files: Flag = without_effect(
        "files are always sorted by their paths, as their order in the file system differs "
        "between machines",
        default=True,
    )
    use_worker_cache: Flag = without_effect("files are read where they are", default=False)
    dataset_map_fn: Any = None

    @override
    def sources(self) -> list[SampleSource]:
        return parse_sources(self.data_dir, self.mixture, self.data_subset)

    @override
    def begin(self, rows: RowOptions) -> None:
        self.pads = self.pad_last
        if self.pad_last and self.drop_last:
            say_once(
                f"{type(self).__name__}.pad_last has no effect: with drop_last, all batches are "
                f"full. Set drop_last: false to fill the last batch of each epoch."
            )
        super().begin(rows)
