"""Questions with contexts that answer them or do not, from HDF5 files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import Names, checked_dataclass, without_effect
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.processor import FolderProcessor
from modelzoo_trainer.zoo.data.hdf5.retrieval_rows import CONTEXT_DATASET, QUESTION_DATASET
from modelzoo_trainer.zoo.rows.hdf5_format import PARAMS

_KINDS: Final = ("input_ids", "attention_mask", "token_type_ids")
QUESTION_FEATURES: Final = tuple(f"questions_{kind}" for kind in _KINDS)
CONTEXT_FEATURES: Final = tuple(f"ctx_{kind}" for kind in _KINDS)


@checked_dataclass(kw_only=True)
class DPRHDF5DataProcessor(FolderProcessor):
    """Load batches of questions with contexts from HDF5 files, for `dpr`.

    Files have a dataset `data_0` of shape (samples, 3, S), the questions, and a dataset `data_1` of
    shape (samples, 3, C, T), their contexts: of each question, the first one answers it, and the
    others do not. Rows are the token ids, the mask (0 for padding) and the segments.

    Args:
        batch_size: Questions per batch over all processes, a multiple of their number.
        use_vsl: Must be false: texts are not packed.
        data_dir: A folder with `.h5` files, or a list of them.
        features_list: No effect: `data_0_features` and `data_1_features` of `data_params.json` in
            the folder name the rows, if they are in another order.

    Shapes:
        A batch: `input_ids`, `attention_mask` and `token_type_ids`, with `questions_` in front
        (B, S), with `ctx_` in front (B, C, T); int32. There are no labels: the first context is
        the right one, wherever a process or a micro-batch cuts a batch.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name.
    """

    features_list: Names | None = without_effect(f"{PARAMS} names the rows")

    def __post_init__(self) -> None:
        self._refuse_vsl()
        folders = [folder for source in self.sources() for folder in source.folders]
        questions, contexts = _features(folders)
        self.begin(
            RowOptions(features=questions, context_features=contexts, dataset=QUESTION_DATASET)
        )

    @override
    def missing(self) -> list[str]:
        self._refuse_vsl()
        return super().missing()

    def _refuse_vsl(self) -> None:
        if self.use_vsl:
            raise ConfigError(
                f"{type(self).__name__}.use_vsl: true cannot be used: texts are not packed. Remove "
                f"use_vsl."
            )


def _features(folders: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the rows of both datasets, which must be the same in all folders."""
    found = {folder: _features_in(folder) for folder in folders}
    first = next(iter(found.values()))
    for folder, names in found.items():
        if names != first:
            raise ConfigError(
                f"{folder}/{PARAMS} names the rows {names}, but in {folders[0]} they are {first}. "
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
