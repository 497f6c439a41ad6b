"""Masked tokens from HDF5 files that the Model Zoo's or our preprocessing has written."""

from __future__ import annotations

from typing import Any

from modelzoo_trainer.base.constraints import Flag, NonNegativeSize, PositiveInt, Size, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.masked_rows import MASKED_FEATURES, MASKED_VSL_FEATURES
from modelzoo_trainer.zoo.data.hdf5.processor import (
    HDF5Processor,
    check_padding,
    lacks_of,
    say_ignored,
)
from modelzoo_trainer.zoo.data.hdf5.selection import parse_sources
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import say_once


class BertHDF5DataProcessor(HDF5Processor):
    """Load batches of sequences with masked tokens from HDF5 files, for `bert` and `esm2`.

    Files are those of the preprocessing with `training_objective: mlm`: a dataset `data` of shape
    (samples, 2, S) with the rows `input_ids` and `attention_mask` (0 for padding), and a dataset
    `labels` of shape (samples, 1, S), -100 where nothing is predicted, or (samples, 3, P) with the
    labels of P positions, these positions and the weights. Order, subsets and mixtures are those of
    `GptHDF5MapDataProcessor`.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        data_dir: One or a list of folders with `.h5` files, which are read in the order of their
            paths; subfolders are not read. Give either this or `mixture`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order.
        num_workers: Number of worker processes; 0 = load in the main process.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        use_worker_cache: No effect.
        max_sequence_length: If given, must be that of the files.
        data_subset: Fractions of the samples to use, such as `0.0-0.3,0.7-1.0`.
        num_samples: Samples per epoch; default: all, or as many as a mixture needs until its larger
            folders are used up.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        pad_last: Whether to fill it with rows that do not count; requires `drop_last: false`.
        sort_files: No effect: files are always sorted.
        use_vsl: Whether samples have several documents each: 4 features, the last two of them
            `attention_span` and `position_ids`.
        dataset_map_fn: Not supported.
        vocab_size: No effect.

    Shapes:
        A batch: input_ids and attention_mask (B, S), int32; labels (B, S), or labels,
        masked_lm_positions and masked_lm_mask (B, P); with `use_vsl` also attention_span and
        position_ids (B, S).

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or if arguments exclude each other.
    """

    @checked()
    def __init__(
        self,
        *,
        batch_size: PositiveInt,
        data_dir: str | list[str] | None = None,
        mixture: list[dict[str, Any]] | None = None,
        shuffle: Flag = False,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        use_worker_cache: Flag = False,
        max_sequence_length: Size | None = None,
        data_subset: str | None = None,
        num_samples: Size | None = None,
        drop_last: Flag = True,
        pad_last: Flag = False,
        sort_files: Flag = True,
        use_vsl: Flag = False,
        dataset_map_fn: Any = None,
        vocab_size: Any = None,
    ) -> None:
        owner = type(self).__name__
        sources = parse_sources(data_dir, mixture, data_subset)
        _refuse_function(owner, dataset_map_fn)
        check_padding(owner, drop_last=drop_last, pad_last=pad_last, has_function=False)
        if not sort_files:
            say_once(f"{owner}.sort_files: false has no effect: files are always sorted.")
        say_ignored(owner, {"use_worker_cache": use_worker_cache, "vocab_size": vocab_size})
        rows = RowOptions(
            max_sequence_length=max_sequence_length,
            features=MASKED_VSL_FEATURES if use_vsl else MASKED_FEATURES,
            vsl=use_vsl,
            num_samples=num_samples,
            has_labels=True,
        )
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.begin(sources, rows, options, pad_last=pad_last)

    @classmethod
    def check_arguments(
        cls,
        *,
        data_dir: str | list[str] | None = None,
        mixture: list[dict[str, Any]] | None = None,
        data_subset: str | None = None,
        dataset_map_fn: Any = None,
        **others: Any,
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        _refuse_function(cls.__name__, dataset_map_fn)
        return lacks_of(parse_sources(data_dir, mixture, data_subset))


def _refuse_function(owner: str, function: Any) -> None:
    if function is not None:
        raise ConfigError(
            f"{owner}.dataset_map_fn is not supported: labels are in a dataset of their own. "
            f"Remove it, or use GptHDF5MapDataProcessor."
        )
