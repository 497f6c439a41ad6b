"""Batches of questions and contexts from HDF5 files, which are in datasets of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.files import RowFiles
from modelzoo_trainer.zoo.data.hdf5.rows import Ints, SampleRows, Segments, padded
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature

QUESTION_DATASET: Final = "data_0"
CONTEXT_DATASET: Final = "data_1"
_QUESTION_DIMS, _CONTEXT_DIMS = 2, 3  # of a row


class RetrievalRows(SampleRows):
    """Rows of questions in one dataset of the files, and of their contexts in another one.

    Args:
        files: The questions, rows (3, S).
        contexts: The contexts of the same rows, (3, C, T).
        segments: Which of the rows are the samples.
        features: Names of the rows of questions.
        context_features: Names of the rows of contexts.

    Shapes:
        A batch: features of questions (B, S), of contexts (B, C, T), int32.

    Raises:
        ConfigError: If contexts do not fit the questions.
    """

    def __init__(
        self,
        files: RowFiles,
        contexts: RowFiles,
        segments: Segments,
        *,
        features: Sequence[str],
        context_features: Sequence[str],
    ) -> None:
        super().__init__(files, segments, features=features)
        self._contexts = SampleRows(contexts, segments, features=context_features)
        files.check_num_rows(contexts.files, "Create the file again.")
        _check_shape(files, features, _QUESTION_DIMS, "(3, tokens)")
        _check_shape(contexts, context_features, _CONTEXT_DIMS, "(3, contexts, tokens)")

    def follow_model(self, model: Any) -> None:
        """Take the number of segments of the encoders: segments in files must be below it."""
        found = getattr(model, "num_segments_of_texts", (None, None))
        self.num_segments, self._contexts.num_segments = found

    @override
    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        self._contexts.check_model(vocab_size, max_position_embeddings)
        super().check_model(vocab_size, max_position_embeddings)

    @override
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        return {
            name: tensor
            for one in (self, self._contexts)
            for name, tensor in by_feature(
                padded(one._read(places), rows, size), one.features
            ).items()
        }


def _check_shape(files: RowFiles, features: Sequence[str], dims: int, expected: str) -> None:
    shape, first = files.row_shape, files.files[0]
    if len(shape) != dims or shape[0] != len(features):
        raise ConfigError(
            f"{first.path}: dataset {first.dataset!r} has rows of shape {shape}, expected "
            f"{expected}: {', '.join(features)}."
        )
