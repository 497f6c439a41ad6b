"""Language modeling on HDF5 files that the Model Zoo's or our preprocessing has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map
from typing_extensions import override

from modelzoo_trainer.base.constraints import Flag, Size, checked_dataclass, without_effect
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.processor import FolderProcessor, MixtureProcessor
from modelzoo_trainer.zoo.data.hdf5.transforms import BatchTransform, parse_transforms
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.stream_processor import say_once
from modelzoo_trainer.zoo.rows.hdf5_format import FEATURES, PARAMS, VSL_FEATURES

EPOCHS_REPEAT: Final = "epochs repeat until the loop ends"


@checked_dataclass(kw_only=True)
class GptHDF5MapDataProcessor(MixtureProcessor):
    """Load batches of token sequences from HDF5 files, several folders or a mixture of them.

    Files have either whole samples, a dataset `data` of shape (samples, features, S) with the rows
    `input_ids`, `attention_mask` (which labels count) and `labels`, or a corpus, `data` of shape
    (tokens,): a sample is a window of `max_sequence_length` tokens. The order of samples
    depends on the arguments and the names of the files alone.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        shuffle_seed: Seed of the order and of `data_transforms`.
        max_sequence_length: Tokens per sample of a corpus; default: `max_position_embeddings` of
            the model. Files of samples have theirs.
        dataset_map_fn: A function that makes a sample of an array of a file, (features, S), or of
            the S + 1 tokens of a window; in Python only.
        data_transforms: Changes to batches, a list of `{name, ...arguments}`: `add_sink_tokens`,
            `add_memory_tokens`, `add_pose_shift`.

    Shapes:
        A batch: input_ids, attention_mask and labels (B, S), int32; with `use_vsl` also
        attention_span and position_ids.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or if arguments exclude each other.
    """

    dataset_map_fn: Callable[[Any], Any] | None = None
    data_transforms: list[dict[str, Any]] | None = None
    repeat: Any = without_effect(EPOCHS_REPEAT)

    def __post_init__(self) -> None:
        self.begin(self._rows())

    @override
    def sample_features(self, model: Any) -> Features | None:
        if self.dataset_map_fn is not None:
            return None
        transforms = parse_transforms(self.data_transforms)
        length = _length_before(transforms, length_without_data(self, model))
        if self.max_sequence_length is not None:
            length = self.max_sequence_length
        names = VSL_FEATURES if self.use_vsl else FEATURES
        return _features_after(transforms, names, length)

    @override
    def missing(self) -> list[str]:
        self._rows()
        return super().missing()

    def _rows(self) -> RowOptions:
        """Return how samples are read.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        owner, function = type(self).__name__, self.dataset_map_fn
        transforms = parse_transforms(self.data_transforms)
        if function is not None and not callable(function):
            raise ConfigError(
                f"{owner}.dataset_map_fn: expected a function, got {function!r}. It can be set in "
                f"Python only."
            )
        reasons = {
            ("use_vsl", "data_transforms"): "transforms do not know the documents of a sample",
            ("use_vsl", "dataset_map_fn"): "the function names the features",
            ("data_transforms", "dataset_map_fn"): "the function does all changes",
            ("pad_last", "dataset_map_fn"): "its samples have no padding",
        }
        for (one, other), reason in reasons.items():
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(
                    f"{owner}: {one} cannot be set together with {other}: {reason}. Remove one of "
                    f"them."
                )
        return RowOptions(
            max_sequence_length=self.max_sequence_length,
            features=VSL_FEATURES if self.use_vsl else FEATURES,
            vsl=self.use_vsl,
            transforms=transforms,
            seed=self.shuffle_seed,
            num_samples=self.num_samples,
            map_fn=function,
        )


@checked_dataclass(kw_only=True)
class GptHDF5DataProcessor(FolderProcessor):
    """Load batches of token sequences from HDF5 files of whole samples.

    It differs from `GptHDF5MapDataProcessor` in the names of the features, which may be any, and
    has no corpora, mixtures and transforms. Samples come in the order of the files, or shuffled
    over all of them, whatever the number of processes and workers.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        features_list: Names of the features in the files. Those in the file `data_params.json` of
            the folder come first, if `data_dir` is one folder.

    Shapes:
        A batch: each feature (B, S), int32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name.
    """

    shuffle: Flag
    max_sequence_length: Size | None = without_effect(
        "this processor reads whole samples, as long as they are in the files"
    )
    repeat: Any = without_effect(EPOCHS_REPEAT)
    use_multiple_workers: Any = without_effect("num_workers decides")

    @override
    def sample_features(self, model: Any) -> Features:
        given = self.features_list
        names = features_of(type(self).__name__, self.data_dir, given, use_vsl=self.use_vsl)
        return rows_of(names, length_without_data(self, model))

    def __post_init__(self) -> None:
        owner, vsl = type(self).__name__, self.use_vsl
        features = features_of(owner, self.data_dir, self.features_list, use_vsl=vsl)
        self.begin(RowOptions(features=features, vsl=vsl, seed=self.shuffle_seed or 0))


def _length_before(transforms: Sequence[BatchTransform], limit: int) -> int:
    """Return the length of samples that transforms make as long as the model allows."""
    length = limit
    while length > 1:
        after = length
        for one in transforms:
            after = one.length_after(after)
        if after <= limit:
            return length
        length -= after - limit
    return limit


def _features_after(
    transforms: Sequence[BatchTransform], names: Sequence[str], length: int
) -> Features:
    """Return the features of changed samples: of a row of zeros, which they change."""
    batch: Any = {name: torch.zeros(1, length, dtype=torch.int32) for name in names}
    for one in transforms:
        batch = one(batch, np.zeros(1, np.int64), (0, 0))
    found: Features = tree_map(lambda row: Feature(tuple(row.shape[1:]), row.dtype), batch)
    return found


def features_of(
    owner: str, data_dir: str | list[str], given: list[str] | None, *, use_vsl: bool
) -> tuple[str, ...]:
    """Return the names of the features: of packed documents, of the folder, or as given."""
    if use_vsl:
        if given is not None and tuple(given) != VSL_FEATURES:
            say_once(f"{owner}.features_list has no effect: use_vsl decides the features.")
        return VSL_FEATURES
    path = Path(data_dir).expanduser() / PARAMS if isinstance(data_dir, str) else None
    if path is None or not path.is_file():
        return tuple(given or FEATURES)
    found = _features_in(path)
    if found is None:
        return tuple(given or FEATURES)
    if given is not None and tuple(given) != found:
        say_once(
            f"{owner}.features_list has no effect: {path} says that the features are "
            f"{', '.join(found)}."
        )
    return found


def _features_in(path: Path) -> tuple[str, ...] | None:
    """Return the features that a `data_params.json` names; None if it names none.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        params = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = reason_of(error)
        raise ConfigError(
            f"{path} cannot be read ({why}). Correct it, or remove it to use features_list."
        ) from error
    params = params if isinstance(params, dict) else {}
    features = params.get("features")
    if features is None:
        if "data_0_features" in params:
            raise ConfigError(
                f"{path} names several datasets per file (data_0_features and so on), but this "
                f"processor reads one, 'data'."
            )
        return None
    if not isinstance(features, list) or not all(isinstance(one, str) for one in features):
        raise ConfigError(f"{path}: features: expected a list of names, got {features!r}.")
    return tuple(features)
