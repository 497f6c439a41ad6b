"""Pairs of a chosen and a rejected answer, from HDF5 files."""

from __future__ import annotations

from typing import Any

from modelzoo_trainer.base.constraints import (
    Flag,
    Names,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5DataProcessor
from modelzoo_trainer.zoo.data.hdf5.rows import HDF5Rows
from modelzoo_trainer.zoo.data.processor import ShuffleSeed
from modelzoo_trainer.zoo.rows.hdf5_format import DPO_FEATURES


class DpoHDF5DataProcessor(GptHDF5DataProcessor):
    """Load batches of preferences from HDF5 files: a dataset `data` of shape (samples, 6, S).

    Args:
        data_dir: One or a list of folders with `.h5` files.
        batch_size: Pairs of answers per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        use_vsl: Must be false: answers are not packed.
        features_list: Order of the features in the files; `data_params.json` of the folder comes
            first, if `data_dir` is one folder.
        vocab_size: No effect.

    Shapes:
        A batch: `input_ids`, `attention_mask` (which labels count) and `labels` with `chosen_` and
        `rejected_` in front, each (B, S), int32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name.
    """

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        shuffle: Flag = False,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        use_vsl: Flag = False,
        features_list: Names | None = None,
        vocab_size: Any = None,
    ) -> None:
        _check_features(features_list, "DpoHDF5DataProcessor.features_list", use_vsl=use_vsl)
        super().__init__(
            data_dir=data_dir,
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_buffer=shuffle_buffer,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            features_list=list(features_list or DPO_FEATURES),
            vocab_size=vocab_size,
        )
        assert isinstance(self.dataset, HDF5Rows)
        _check_features(list(self.dataset.features), f"{data_dir}: the features", use_vsl=False)

    @classmethod
    def check_arguments(
        cls,
        *,
        data_dir: str | list[str],
        use_vsl: bool = False,
        features_list: list[str] | None = None,
        **others: Any,
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder, or the features are others.
        """
        _check_features(features_list, f"{cls.__name__}.features_list", use_vsl=use_vsl)
        return super().check_arguments(data_dir=data_dir)


def _check_features(given: list[str] | None, where: str, *, use_vsl: bool) -> None:
    if use_vsl:
        raise ConfigError(
            "DpoHDF5DataProcessor.use_vsl: true cannot be used: pairs of answers are not packed. "
            "Remove use_vsl."
        )
    if given is not None and sorted(given) != sorted(DPO_FEATURES):
        raise ConfigError(
            f"{where} are {', '.join(given)}; expected {', '.join(DPO_FEATURES)}. Preprocess the "
            f"data with mode dpo."
        )
