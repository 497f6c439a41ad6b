"""Batches of masked tokens from HDF5 files, whose labels are in a dataset of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.files import RowFiles
from modelzoo_trainer.zoo.data.hdf5.rows import Ints, SampleRows, Segments, padded
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature
from modelzoo_trainer.zoo.rows.hdf5_format import (
    IGNORED_LABEL,
    INPUTS,
    LABELS,
    MASK,
    MASKED_WEIGHTS,
    POSITIONS,
    SPAN,
)

MASKED_FEATURES: Final = (INPUTS, MASK)
MASKED_VSL_FEATURES: Final = (*MASKED_FEATURES, SPAN, POSITIONS)
MASKED_POSITIONS: Final = "masked_lm_positions"
_OF_ALL: Final = (LABELS,)
_OF_MASKED: Final = (LABELS, MASKED_POSITIONS, MASKED_WEIGHTS)


class MaskedRows(SampleRows):
    """Rows of inputs in the dataset `data`, and of labels in the dataset `labels`.

    A sample has labels of all its positions, (1, S), or of P of them, (3, P): the labels, their
    positions, and 1 where there is one. In a padding row, no label counts.

    Args:
        files: The inputs.
        labels: The labels, of the same rows.
        segments: Which of the rows are the samples.
        features: Names of the rows of the inputs.

    Shapes:
        A batch: each feature (B, S), int32; labels, masked_lm_positions and masked_lm_mask (B, P),
        or labels alone, (B, S).

    Raises:
        ConfigError: If labels do not fit the inputs.
    """

    def __init__(
        self, files: RowFiles, labels: RowFiles, segments: Segments, *, features: Sequence[str]
    ) -> None:
        super().__init__(files, segments, features=features)
        self._labels = SampleRows(labels, segments, features=_label_features(files, labels))

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        self._labels.check_model(vocab_size, None)
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        inputs, labels = self._read(places), self._labels._read(places)
        names = self._labels.features
        if len(names) > 1:
            self._check_masked(labels[1], places)
        if size != len(places):
            inputs, labels = padded(inputs, rows, size), padded(labels, rows, size)
            is_padding = np.ones(size, bool)
            is_padding[rows] = False
            labels[0, is_padding] = IGNORED_LABEL
        return {**by_feature(inputs, self.features), **by_feature(labels, names)}

    def _check_masked(self, positions: NDArray[np.int32], places: Ints) -> None:
        if not positions.size or positions.view(np.uint32).max() < self.length:
            return
        row, column = (int(one[0]) for one in np.nonzero(positions.view(np.uint32) >= self.length))
        raise ConfigError(
            f"{self._labels.files.place_of(int(places[row]))}: {MASKED_POSITIONS} has "
            f"{positions[row, column]} in column {column}, but a sample has {self.length} tokens. "
            f"Preprocess the data again."
        )


def _label_features(files: RowFiles, labels: RowFiles) -> tuple[str, ...]:
    """Return the names of the rows of labels.

    Raises:
        ConfigError: If their shape, or the number of rows of a file, does not fit the inputs.
    """
    files.check_num_rows(labels.files, "Preprocess the data again.")
    shape, length = labels.row_shape, files.row_shape[-1]
    if shape == (len(_OF_ALL), length):
        return _OF_ALL
    if len(shape) == 2 and shape[0] == len(_OF_MASKED):
        return _OF_MASKED
    raise ConfigError(
        f"{labels.files[0].path}: dataset {labels.files[0].dataset!r} has rows of shape {shape}, "
        f"expected (1, {length}), the labels of all positions, or (3, number of labels): labels, "
        f"positions and weights. Preprocess the data with training_objective: mlm."
    )
