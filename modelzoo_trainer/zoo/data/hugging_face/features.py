"""Batches of columns that are already what a model takes: token ids, images, numbers.

Dimension letters: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.hugging_face.pixels import Pixels, PixelSettings
from modelzoo_trainer.zoo.data.hugging_face.source import (
    OWNER,
    DatasetSource,
    column_names,
    require_column,
)
from modelzoo_trainer.zoo.data.hugging_face.stream import RowStream
from modelzoo_trainer.zoo.data.processor import LoadingOptions
from modelzoo_trainer.zoo.rows.interface import Document, Stats

FeatureColumns = list[str] | dict[str, str]
Padding = dict[str, float]
Batch = dict[str, Tensor]

_IDS: Final = ("input_ids", "decoder_input_ids")
_FLOATS: Final = ("pixel_values", "input_values", "input_features", "inputs_embeds")
_MASKS: Final[Mapping[str, str]] = {
    "input_ids": "attention_mask",
    "inputs_embeds": "attention_mask",
    "input_values": "attention_mask",
    "input_features": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
    "decoder_inputs_embeds": "decoder_attention_mask",
}
"""The mask for the padding of each argument. The first one that is padded makes it."""
_FILL: Final[Mapping[str, float]] = {
    "input_ids": 0,
    "decoder_input_ids": 0,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": -100,
}
_KINDS: Final = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
_ORDER: Final = (np.bool_, np.int64, np.float32)

Values = npt.NDArray[Any]


class DatasetRow(NamedTuple):
    """A row of the dataset: its number, and its values by column."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSettings:
    """Which columns are the features of a batch, and how they become tensors.

    Args:
        columns: The column of each argument of the model.
        padding: What fills rows that are shorter than the longest of their batch, by argument.
        pixels: How images become pixels.
    """

    columns: dict[str, str]
    padding: Padding = field(default_factory=dict)
    pixels: PixelSettings = field(default_factory=PixelSettings)


def feature_settings(given: Mapping[str, Any]) -> FeatureSettings:
    """Return the settings that the arguments of the data processor give.

    Args:
        given: All arguments by name.

    Raises:
        ConfigError: If there are no columns, one is named twice, or arguments exclude each other.
    """
    columns: FeatureColumns | None = given["feature_columns"]
    if not columns:
        raise ConfigError(
            f"{OWNER}: task features requires feature_columns: the column of each argument of the "
            f"model, such as {{pixel_values: image, labels: label}}, or a list of columns that are "
            f"called like them. Set it."
        )
    if not isinstance(columns, Mapping):
        twice = [name for name in columns if columns.count(name) > 1]
        if twice:
            raise ConfigError(
                f"{OWNER}.feature_columns: {twice[0]!r} is named twice. Name it once."
            )
        columns = {name: name for name in columns}
    padding: Padding = given["padding"] or {}
    for name in padding.keys() - columns.keys():
        raise ConfigError(
            f"{OWNER}.padding: {name!r} is not one of feature_columns. {suggest(name, columns)}"
        )
    names = [one.name for one in fields(PixelSettings)]
    pixels = PixelSettings(**{name: given[name] for name in names})
    pixels.check()
    return FeatureSettings(columns=dict(columns), padding=padding, pixels=pixels)


class Features:
    """Makes batches of rows. It can be pickled.

    Args:
        settings: The settings of the data processor.
        columns_of_images: The columns that have images.
        where: The dataset, for messages.

    Raises:
        ConfigError: If settings of images have no effect.
    """

    def __init__(
        self, settings: FeatureSettings, columns_of_images: Sequence[str], where: str
    ) -> None:
        self.settings = settings
        self._where = where
        self._images = frozenset(columns_of_images)
        self._pixels = Pixels(settings.pixels) if columns_of_images else None
        self._vocab_size: int | None = None
        self._max_positions: int | None = None
        if not columns_of_images and settings.pixels != PixelSettings():
            known = ", ".join(settings.columns.values())
            raise ConfigError(
                f"{OWNER}: image_size and other arguments of images have no effect: none of the "
                f"columns of {where!r} ({known}) is a datasets.Image. Arrays are used as they are. "
                f"Remove the arguments, or cast the column to datasets.Image()."
            )

    @property
    def identity(self) -> str:
        """Identifier that differs between any two settings."""
        return json.dumps(asdict(self.settings), sort_keys=True)

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Keep the limits of a model, which each batch is compared with."""
        self._vocab_size, self._max_positions = vocab_size, max_position_embeddings

    def rows(self, examples: Sequence[Mapping[str, Any]], first: int, stats: Stats) -> Any:
        """Return examples of a stream as rows; `first`: the number of the first of them.

        Shapes:
            Returns: (examples,), objects.
        """
        stats.documents += len(examples)
        stats.rows += len(examples)
        found = np.empty(len(examples), object)
        for number, example in enumerate(examples):
            found[number] = DatasetRow(first + number, example)
        return found

    def batch(self, rows: Sequence[DatasetRow]) -> Batch:
        """Return the batch of rows: integers are int64, other numbers float32.

        Raises:
            ConfigError: If a value is not a number, or rows cannot be batched, with the row.
        """
        found: Batch = {}
        lengths: dict[str, list[int]] = {}
        for name, column in self.settings.columns.items():
            arrays = [self._array(row, name, column) for row in rows]
            if len({one.shape for one in arrays}) > 1:
                self._check_padding(arrays, rows, name, column)
                lengths[name] = [len(one) for one in arrays]
            found[name] = torch.from_numpy(_stacked(arrays, self._fill_of(name)))
        for name, mask in _MASKS.items():
            if name in lengths and mask not in found:
                found[mask] = _mask_of(lengths[name])
        return found

    def _array(self, row: DatasetRow, name: str, column: str) -> Values:
        """Return the value of an argument in a row, as an array of one of three types."""
        value = row.values[column]
        if column in self._images:
            assert self._pixels is not None  # there are images
            return self._pixels.of(value, f"{self._place(row)}, column {column!r}")
        try:
            values: Values = np.asarray(value)
        except ValueError:
            values = np.empty(0, object)
        dtype = _KINDS.get(values.dtype.kind)
        if dtype is None or (dtype is np.float32 and np.isnan(values).any()):
            raise ConfigError(
                f"{self._place(row)}: column {column!r} must have {name} as numbers, or as lists "
                f"of them, got {_shown(value)}. {_advice(value)}"
            )
        if name in _FLOATS:
            dtype = np.float32
        if name in _IDS or (name == "labels" and values.ndim == 1):
            self._check_ids(values, row, name, column)
        return values.astype(dtype, copy=False)

    def _check_ids(self, ids: Values, row: DatasetRow, name: str, column: str) -> None:
        where = f"{self._place(row)}: column {column!r} has"
        is_input = name in _IDS
        if ids.dtype.kind == "f":
            if is_input:
                raise ConfigError(f"{where} numbers that are no integers. Token ids are integers.")
            return
        least, most = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        least = least if is_input else 0  # labels of -100 do not count
        if least < 0 or (self._vocab_size is not None and most >= self._vocab_size):
            raise ConfigError(
                f"{where} the token id {least if least < 0 else most}; the model's are 0 to "
                f"{'vocab_size - 1' if self._vocab_size is None else self._vocab_size - 1}. Use "
                f"the tokenizer of the model, or increase vocab_size; of a folder's weights: "
                f"resize_token_embeddings."
            )
        limit = self._max_positions
        if is_input and limit is not None and ids.ndim and len(ids) > limit:
            raise ConfigError(
                f"{where} {len(ids)} tokens, but the model's max_position_embeddings is "
                f"{limit}. Shorten the rows, or increase max_position_embeddings."
            )

    def _fill_of(self, name: str) -> float | None:
        return self.settings.padding.get(name, _FILL.get(name))

    def _check_padding(
        self, arrays: Sequence[Values], rows: Sequence[DatasetRow], name: str, column: str
    ) -> None:
        """Raise a `ConfigError` if arrays of different shapes cannot be filled to the longest."""
        other = next(n for n, one in enumerate(arrays) if one.shape != arrays[0].shape)
        shapes = " and ".join(str(list(arrays[number].shape)) for number in (0, other))
        where = (
            f"{self._place(rows[0])} and row {rows[other].number}: column {column!r} ({name}) has "
            f"the shapes {shapes} in one batch."
        )
        if column in self._images:
            raise ConfigError(f"{where} Set image_size.")
        if len({one.shape[1:] for one in arrays}) > 1 or not all(one.ndim for one in arrays):
            raise ConfigError(
                f"{where} Only the first dimension may differ. Make the rows alike, or set "
                f"batch_size: 1."
            )
        if self._fill_of(name) is None:
            raise ConfigError(
                f"{where} Set padding: {{{name}: VALUE}} to fill the shorter ones at their end."
            )

    def _place(self, row: DatasetRow) -> str:
        return Document(self._where, row.number, []).where


def _mask_of(lengths: Sequence[int]) -> Tensor:
    """Return 1 in rows of these lengths, and 0 in their padding."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def _stacked(arrays: Sequence[Values], fill: float | None) -> Values:
    """Return arrays as one, the shorter ones filled at their end."""
    dtype = max((one.dtype.type for one in arrays), key=_ORDER.index)
    if fill is None or len({one.shape for one in arrays}) == 1:
        return np.stack(arrays).astype(dtype, copy=False)
    length = max(len(one) for one in arrays)
    found = np.full((len(arrays), length, *arrays[0].shape[1:]), fill, dtype)
    for row, one in zip(found, arrays, strict=True):
        row[: len(one)] = one
    return found


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return "a list with null or NaN"
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return "null or NaN"
    if isinstance(value, str):
        return f"the text {str(value)[:40]!r}"
    if isinstance(value, np.ndarray | list):
        return "a list of something else, or of lists of different lengths"
    return type(value).__name__


def _advice(value: Any) -> str:
    if isinstance(value, str):
        return "Make numbers of texts with class_encode_column, or use another task."
    return "Correct the data, or name another column."


class FeatureRows(BatchDataset):
    """The rows of a dataset, as batches of features.

    Args:
        dataset: A `datasets.Dataset`.
        features: Makes the batches.
    """

    def __init__(self, dataset: Any, features: Features) -> None:
        self._dataset = dataset
        self._features = features
        key = f"{dataset._fingerprint}\0{features.identity}"
        self.fingerprint = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)

    @override
    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def __getitem__(self, index: int) -> Any:
        """Return one row, without a batch dimension."""
        return {key: values[0] for key, values in self.__getitems__([index]).items()}

    @override
    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the batch of these rows."""
        found = self._dataset[indices]
        parts = zip(*found.values(), strict=True)
        rows = [
            DatasetRow(number, dict(zip(found, values, strict=True)))
            for number, values in zip(indices, parts, strict=True)
        ]
        return self._features.batch(rows)

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Keep the limits of a model, which each batch is compared with."""
        self._features.check_model(vocab_size, max_position_embeddings)


class FeatureStream(RowStream):
    """Batches of features of a dataset that is read as a stream.

    Args:
        dataset: A `datasets.IterableDataset`.
        features: Makes the batches.
        options: Batch size, order, and whether a smaller last batch is dropped.
        source: Where the dataset is.
    """

    def __init__(
        self, dataset: Any, features: Features, options: LoadingOptions, source: DatasetSource
    ) -> None:
        given = (options, features.check_model, source.where, source.identity())
        super().__init__(dataset, cast(Any, features), *given)
        self._features = features

    @override
    def _batch(self, rows: Sequence[Any]) -> Any:
        return self._features.batch(rows)


def open_features(
    data: Any, settings: FeatureSettings, options: LoadingOptions, source: DatasetSource
) -> FeatureRows | FeatureStream:
    """Return the batches of a dataset, map-style or as a stream as it is itself.

    Args:
        data: A `datasets.Dataset` or `datasets.IterableDataset`.
        settings: Which columns, and how.
        options: Batch size and order, of a stream.
        source: Where the dataset is.

    Raises:
        ConfigError: If a column is missing, or the first row cannot be used.
    """
    found = column_names(data, source.where)
    for name, column in settings.columns.items():
        require_column(column, f"feature_columns.{name}", found, source.where)
    library: Any = import_module("datasets")
    known = data.features or {}
    own = list(dict.fromkeys(settings.columns.values()))
    images = [name for name in own if isinstance(known.get(name), library.Image)]
    features = Features(settings, images, source.where)
    data = data.select_columns(own)
    for name in images:  # decoded where batches are made, which may be a worker
        data = data.cast_column(name, library.Image(decode=False))
    data = data.with_format("numpy")
    if isinstance(data, library.IterableDataset):
        return FeatureStream(data, features, options, source)
    rows = FeatureRows(data, features)
    rows[0]
    return rows
