"""Language modeling on HDF5 files that the Model Zoo's or our preprocessing has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelzoo_trainer.base.constraints import (
    Flag,
    Names,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
)
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.processor import (
    HDF5Processor,
    check_padding,
    lacks_of,
    say_ignored,
)
from modelzoo_trainer.zoo.data.hdf5.selection import Source, parse_sources
from modelzoo_trainer.zoo.data.hdf5.transforms import parse_transforms
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import say_once
from modelzoo_trainer.zoo.rows.hdf5_format import FEATURES, PARAMS, VSL_FEATURES


class GptHDF5MapDataProcessor(HDF5Processor):
    """Load batches of token sequences from HDF5 files, several folders or a mixture of them.

    Files have either whole samples, a dataset `data` of shape (samples, features, S) with the rows
    `input_ids`, `attention_mask` (which labels count) and `labels`, or a corpus, `data` of shape
    (tokens,), of which a sample is a window of `max_sequence_length` tokens. The order of samples
    depends on the arguments and the names of the files alone.

    Args:
        batch_size: Sequences per batch over all processes, a multiple of their number.
        data_dir: One or a list of folders with `.h5` files, which are read in the order of their
            paths; subfolders are not read. Give either this or `mixture`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`: each batch has
            samples of all, in the proportion of the weights over an epoch.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order and of `data_transforms`.
        num_workers: Number of worker processes; 0 = load in the main process.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        use_worker_cache: No effect.
        max_sequence_length: Tokens per sample of a corpus; default: `max_position_embeddings` of
            the model. Files of samples have theirs.
        data_subset: Fractions of the samples to use, such as `0.0-0.3,0.7-1.0`.
        num_samples: Samples per epoch; default: all, or as many as a mixture needs until its larger
            folders are used up.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        pad_last: Whether to fill it with rows that do not count; requires `drop_last: false`.
        sort_files: No effect: files are always sorted.
        use_vsl: Whether samples have several documents each: 5 features, the last two of them
            `attention_span` and `position_ids`.
        dataset_map_fn: A function that makes a sample of an array of a file, (features, S), or of
            the S + 1 tokens of a window; in Python only.
        data_transforms: Changes to batches, a list of `{name, ...arguments}`: `add_sink_tokens`,
            `add_memory_tokens`, `add_pose_shift`.
        vocab_size: No effect.
        repeat: No effect.

    Shapes:
        A batch: input_ids, attention_mask and labels (B, S), int32; with `use_vsl` also
        attention_span and position_ids.

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
        dataset_map_fn: Callable[[Any], Any] | None = None,
        data_transforms: list[dict[str, Any]] | None = None,
        vocab_size: Any = None,
        repeat: Any = None,
    ) -> None:
        owner = type(self).__name__
        sources, rows = _checked(
            owner,
            {
                "data_dir": data_dir,
                "mixture": mixture,
                "data_subset": data_subset,
                "max_sequence_length": max_sequence_length,
                "num_samples": num_samples,
                "use_vsl": use_vsl,
                "dataset_map_fn": dataset_map_fn,
                "data_transforms": data_transforms,
                "shuffle_seed": shuffle_seed,
            },
        )
        check_padding(
            owner,
            drop_last=drop_last,
            pad_last=pad_last,
            has_function=dataset_map_fn is not None,
        )
        if not sort_files:
            say_once(
                f"{owner}.sort_files: false has no effect: files are always sorted by their paths, "
                f"as their order in the file system differs between machines."
            )
        ignored = {"use_worker_cache": use_worker_cache, "vocab_size": vocab_size, "repeat": repeat}
        say_ignored(owner, ignored)
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
        drop_last: bool = True,
        pad_last: bool = False,
        **arguments: Any,
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        sources, rows = _checked(cls.__name__, arguments)
        if pad_last and rows.map_fn is not None:
            check_padding(cls.__name__, drop_last=drop_last, pad_last=True, has_function=True)
        return lacks_of(sources)


class GptHDF5DataProcessor(HDF5Processor):
    """Load batches of token sequences from HDF5 files of whole samples.

    It differs from `GptHDF5MapDataProcessor` in the names of the features, which may be any, and
    has no corpora, mixtures and transforms. Samples come in the order of the files, or shuffled
    over all of them, whatever the number of processes and workers.

    Args:
        data_dir: One or a list of folders with `.h5` files.
        batch_size: Sequences per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        use_vsl: Whether samples have several documents each: 5 features, the last two of them
            `attention_span` and `position_ids`.
        features_list: Names of the features in the files. Those in the file `data_params.json` of
            the folder come first, if `data_dir` is one folder.
        max_sequence_length: No effect.
        vocab_size: No effect.
        repeat: No effect.
        use_multiple_workers: No effect.

    Shapes:
        A batch: each feature (B, S), int32.

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
        shuffle: Flag,
        shuffle_seed: ShuffleSeed | None = None,
        shuffle_buffer: Size | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        use_vsl: Flag = False,
        features_list: Names | None = None,
        max_sequence_length: Size | None = None,
        vocab_size: Any = None,
        repeat: Any = None,
        use_multiple_workers: Any = None,
    ) -> None:
        owner = type(self).__name__
        ignored = {
            "shuffle_buffer": shuffle_buffer,
            "max_sequence_length": max_sequence_length,
            "vocab_size": vocab_size,
            "repeat": repeat,
            "use_multiple_workers": use_multiple_workers,
        }
        say_ignored(owner, ignored)
        seed = shuffle_seed or 0
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=seed,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        sources = parse_sources(data_dir, None, None)
        features = _features(owner, data_dir, features_list, use_vsl=use_vsl)
        self.begin(sources, RowOptions(features=features, vsl=use_vsl, seed=seed), options)

    @classmethod
    def check_arguments(cls, *, data_dir: str | list[str], **others: Any) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder.
        """
        return lacks_of(parse_sources(data_dir, None, None))


def _checked(owner: str, given: Mapping[str, Any]) -> tuple[list[Source], RowOptions]:
    """Return the sources and how to read them.

    Raises:
        ConfigError: If an argument is invalid, or arguments exclude each other.
    """
    sources = parse_sources(given.get("data_dir"), given.get("mixture"), given.get("data_subset"))
    transforms = parse_transforms(given.get("data_transforms"))
    function, vsl = given.get("dataset_map_fn"), bool(given.get("use_vsl"))
    if function is not None and not callable(function):
        raise ConfigError(
            f"{owner}.dataset_map_fn: expected a function, got {function!r}. It can be set in "
            f"Python only."
        )
    chosen = {"use_vsl": vsl, "data_transforms": transforms, "dataset_map_fn": function}
    reasons = {
        ("use_vsl", "data_transforms"): "transforms do not know the documents of a sample",
        ("use_vsl", "dataset_map_fn"): "the function names the features",
        ("data_transforms", "dataset_map_fn"): "the function does all changes",
    }
    for (one, other), reason in reasons.items():
        if chosen[one] and chosen[other]:
            raise ConfigError(
                f"{owner}: {one} cannot be set together with {other}: {reason}. Remove one of them."
            )
    return sources, RowOptions(
        max_sequence_length=given.get("max_sequence_length"),
        features=VSL_FEATURES if vsl else FEATURES,
        vsl=vsl,
        transforms=transforms,
        seed=given.get("shuffle_seed", 0),
        num_samples=given.get("num_samples"),
        map_fn=function,
    )


def _features(
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
