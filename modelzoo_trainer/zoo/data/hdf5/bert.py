"""Masked tokens from HDF5 files that the Model Zoo's or our preprocessing has written."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.masked_rows import MASKED_FEATURES, MASKED_VSL_FEATURES
from modelzoo_trainer.zoo.data.hdf5.processor import MixtureProcessor
from modelzoo_trainer.zoo.data.sample_features import Features, length_without_data, rows_of
from modelzoo_trainer.zoo.rows.hdf5_format import LABELS


@checked_dataclass(kw_only=True)
class BertHDF5DataProcessor(MixtureProcessor):
    """Load batches of sequences with masked tokens from HDF5 files, for `bert` and `esm2`.

    Files come from the preprocessing with `training_objective: mlm`: a dataset `data` of shape
    (samples, 2, S) with the rows `input_ids` and `attention_mask` (0 for padding), and a dataset
    `labels` of shape (samples, 1, S), -100 where nothing is predicted, or (samples, 3, P) with the
    labels of P positions, these positions and the weights. Order, subsets and mixtures are as in
    `GptHDF5MapDataProcessor`.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        use_vsl: Whether samples have several documents each: 4 features, the last two of them
            `attention_span` and `position_ids`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`.
        max_sequence_length: If given, must equal the files'.

    Shapes:
        A batch: input_ids and attention_mask (B, S), int32; labels (B, S), or labels,
        masked_lm_positions and masked_lm_mask (B, P); with `use_vsl` also attention_span and
        position_ids (B, S).

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or if arguments exclude each other.
    """

    def __post_init__(self) -> None:
        self._refuse_function()
        self.begin(
            RowOptions(
                max_sequence_length=self.max_sequence_length,
                features=MASKED_VSL_FEATURES if self.use_vsl else MASKED_FEATURES,
                vsl=self.use_vsl,
                num_samples=self.num_samples,
                has_labels=True,
            )
        )

    @override
    def sample_features(self, model: Any) -> Features:
        names = MASKED_VSL_FEATURES if self.use_vsl else MASKED_FEATURES
        # Files may have labels of masked positions alone, which takes less.
        return rows_of((*names, LABELS), length_without_data(self, model))

    @override
    def missing(self) -> list[str]:
        self._refuse_function()
        return super().missing()

    def _refuse_function(self) -> None:
        if self.dataset_map_fn is not None:
            raise ConfigError(
                f"{type(self).__name__}.dataset_map_fn is not supported: labels are in a dataset "
                f"of their own. Remove it, or use GptHDF5MapDataProcessor."
            )
