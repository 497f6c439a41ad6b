"""Questions with contexts that answer them or do not, from HDF5 files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
from modelzoo_trainer.zoo.data.hdf5.processor import HDF5Processor, lacks_of, say_ignored
from modelzoo_trainer.zoo.data.hdf5.retrieval_rows import CONTEXT_DATASET, QUESTION_DATASET
from modelzoo_trainer.zoo.data.hdf5.selection import parse_sources
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import say_without_effect
from modelzoo_trainer.zoo.rows.hdf5_format import PARAMS

_KINDS: Final = ("input_ids", "attention_mask", "token_type_ids")
QUESTION_FEATURES: Final = tuple(f"questions_{kind}" for kind in _KINDS)
CONTEXT_FEATURES: Final = tuple(f"ctx_{kind}" for kind in _KINDS)


class DPRHDF5DataProcessor(HDF5Processor):
    """Load batches of questions with contexts from HDF5 files, for `dpr`.

    Files have a dataset `data_0` of shape (samples, 3, S), the questions, and a dataset `data_1` of
    shape (samples, 3, C, T), their contexts: of each question, the first one answers it, and the
    others do not. Rows are the token ids, the mask (0 for padding) and the segments.

    Args:
        data_dir: A folder with `.h5` files, or a list of them.
        batch_size: Questions per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        shuffle_buffer: No effect.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        use_vsl: Must be false: texts are not packed.
        features_list: No effect: `data_0_features` and `data_1_features` of `data_params.json` in
            the folder name the rows, if they are in another order.
        vocab_size: No effect.

    Shapes:
        A batch: `input_ids`, `attention_mask` and `token_type_ids`, with `questions_` in front
        (B, S), with `ctx_` in front (B, C, T); int32. There are no labels: the first context is
        the right one, wherever a process or a micro-batch cuts a batch.

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
        owner = type(self).__name__
        _refuse_vsl(owner, use_vsl=use_vsl)
        say_ignored(owner, {"shuffle_buffer": shuffle_buffer, "vocab_size": vocab_size})
        reasons = {"features_list": f"{PARAMS} names the rows"}
        say_without_effect(owner, {"features_list": features_list}, reasons)
        options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed or 0,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        sources = parse_sources(data_dir, None, None)
        folders = [folder for source in sources for folder in source.folders]
        questions, contexts = _features(folders)
        rows = RowOptions(features=questions, context_features=contexts, dataset=QUESTION_DATASET)
        self.begin(sources, rows, options)

    @classmethod
    def check_arguments(
        cls, *, data_dir: str | list[str], use_vsl: bool = False, **others: Any
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If `data_dir` names no folder, or `use_vsl` is set.
        """
        _refuse_vsl(cls.__name__, use_vsl=use_vsl)
        return lacks_of(parse_sources(data_dir, None, None))


def _features(folders: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the rows of both datasets, which must be the same in all folders."""
    found = {folder: _features_in(folder) for folder in folders}
    first = next(iter(found.values()))
    for folder, names in found.items():
        if names != first:
            raise ConfigError(
                f"{folder}/{PARAMS} names the rows {names}, but that of {folders[0]} {first}. "
                f"Create the files in the same way."
            )
    return first


def _features_in(folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path = Path(folder).expanduser() / PARAMS
    if not path.is_file():
        return QUESTION_FEATURES, CONTEXT_FEATURES
    try:
        params = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}.") from error
    both = []
    for dataset, known in (
        (QUESTION_DATASET, QUESTION_FEATURES),
        (CONTEXT_DATASET, CONTEXT_FEATURES),
    ):
        key = f"{dataset}_features"
        names = params.get(key, list(known)) if isinstance(params, dict) else None
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(known):
            raise ConfigError(f"{path}: {key} is {names!r}, expected {', '.join(known)}.")
        both.append(tuple(names))
    return both[0], both[1]


def _refuse_vsl(owner: str, *, use_vsl: bool) -> None:
    if use_vsl:
        raise ConfigError(
            f"{owner}.use_vsl: true cannot be used: texts are not packed. Remove use_vsl."
        )
