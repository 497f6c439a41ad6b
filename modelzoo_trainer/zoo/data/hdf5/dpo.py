"""Pairs of a chosen and a rejected answer, from HDF5 files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.gpt import features_of
from modelzoo_trainer.zoo.data.hdf5.processor import FolderProcessor
from modelzoo_trainer.zoo.data.sample_features import Features, length_without_data, rows_of
from modelzoo_trainer.zoo.rows.hdf5_format import DPO_FEATURES


@checked_dataclass(kw_only=True)
class DpoHDF5DataProcessor(FolderProcessor):
    """Load batches of preferences from HDF5 files: a dataset `data` of shape (samples, 6, S).

    Args:
        batch_size: Pairs of answers per batch over all processes, a multiple of their number.
        use_vsl: Must be false: answers are not packed.
        features_list: Order of the features in the files; `data_params.json` of the folder comes
            first, if `data_dir` is one folder.

    Shapes:
        A batch: `input_ids`, `attention_mask` (which labels count) and `labels` with `chosen_` and
        `rejected_` in front, each (B, S), int32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name.
    """

    def __post_init__(self) -> None:
        self._check()
        given = list(self.features_list or DPO_FEATURES)
        features = features_of(type(self).__name__, self.data_dir, given, use_vsl=False)
        _check_features(features, f"{self.data_dir}: the features")
        self.begin(RowOptions(features=features, seed=self.shuffle_seed or 0))

    def _check(self) -> None:
        if self.use_vsl:
            raise ConfigError(
                "DpoHDF5DataProcessor.use_vsl: true cannot be used: pairs of answers are not "
                "packed. Remove use_vsl."
            )
        _check_features(self.features_list, "DpoHDF5DataProcessor.features_list")

    @override
    def sample_features(self, model: Any) -> Features:
        return rows_of(self.features_list or DPO_FEATURES, length_without_data(self, model))

    @override
    def missing(self) -> list[str]:
        self._check()
        return super().missing()


def _check_features(given: Sequence[str] | None, where: str) -> None:
    if given is not None and sorted(given) != sorted(DPO_FEATURES):
        raise ConfigError(
            f"{where} are {', '.join(given)}; expected {', '.join(DPO_FEATURES)}. Preprocess the "
            f"data with mode dpo."
        )
