"""Predictions: the model's outputs, collected from all batches and processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, RandomSampler
from typing_extensions import override

from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs
from modelzoo_trainer.core.artifact_dir import folder_of
from modelzoo_trainer.core.parts.prediction_store import (
    Number,
    PredictionStore,
    Rows,
    RowsPlace,
    prepare_folder,
    remove_earlier,
    write_index,
)
from modelzoo_trainer.core.parts.predictions import OutputPart, Predictions
from modelzoo_trainer.core.summary import loaded_step_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.loading.sharding import drops_last, is_split_already
from modelzoo_trainer.loading.sources import split_of

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Comm
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.predict")

FOLDER: Final = "predictions"
"""The default folder of predictions in `model_dir`."""
_MESSAGE_BYTES: Final = 2**25  # of predictions in one message between processes


class Predicting(CoreCallback):
    """Collect the model's outputs for the batches of `trainer.predict`.

    Outputs are read like metrics, without waiting for the device. Each process keeps the outputs of
    its own batches; at the end they are put in the order of the data, in the memory of all
    processes or in files with one index.
    """

    def __init__(self) -> None:
        self.is_active = False
        """Whether `trainer.predict` is running."""
        self._store: PredictionStore | None = None
        self._number: Number = (0, 0)
        self._weight: str | None = None
        self._path: Path | None = None

    @contextmanager
    def collecting(
        self, trainer: Trainer, output_dir: str | Path | None, max_in_memory: int
    ) -> Iterator[Callable[[], Predictions]]:
        """Collect outputs inside; yield a function that returns them after the last batch.

        Args:
            trainer: The trainer.
            output_dir: The folder for files; None = use files only if they are too large.
            max_in_memory: Maximum bytes in memory, of all processes.

        Raises:
            ConfigError: If a setting is invalid. Collective.
        """
        if self.is_active:
            raise ConfigError("predict is already running; do not call it from within itself.")
        if type(max_in_memory) is not int or max_in_memory < 0:
            raise ConfigError(
                f"max_in_memory must be an integer >= 0 (bytes), got {max_in_memory!r}."
            )
        if not trainer.backend.caps.holds_values:
            raise ConfigError(
                f"predict cannot run on device {trainer.backend.name!r}, whose tensors have no "
                f"data. Use a real device, such as cpu."
            )
        comm = trainer.backend.comm
        given = None if output_dir is None else folder_of("output_dir", output_dir).absolute()
        if given is None and trainer.object_store.is_split:
            raise ConfigError(
                "predict: processes are on hosts that do not share the local copy of model_dir. "
                "Set output_dir to a folder that all of them share."
            )
        folder = given or trainer.model_dir / FOLDER
        problem = prepare_folder(folder, makes=given is not None) if comm.is_main else None
        problem = comm.broadcast_object(problem)
        if problem is not None:
            raise ConfigError(problem)
        limit = 0 if given is not None else max(max_in_memory // comm.data_shard[1], 1)
        rank = None if comm.world_size == 1 else comm.rank
        store = self._store = PredictionStore(folder, limit, rank)
        self._number, self._path, self.is_active = (0, 0), None, True
        with ExitStack() as stack:
            trainer.logging.open_handlers(trainer, stack)  # also for what is said at the end
            stack.callback(self._leave, store)
            yield partial(self._finish, trainer, store)

    def _leave(self, store: PredictionStore) -> None:
        self.is_active, self._store = False, None
        store.discard()

    # ---- batches

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        self._path = ckpt_path

    @override
    def on_predict_start(
        self, trainer: Trainer, model: Module, dataloader: Loader, loop: Any
    ) -> None:
        if not self.is_active:
            return
        log.info("Predicting with %s.", self._weights(trainer))
        self._weight = _weight_of(dataloader)
        _check_order(dataloader, trainer.backend.comm)

    def _weights(self, trainer: Trainer) -> str:
        if self._path is not None:
            return shown_path(self._path)
        best = loaded_step_of(trainer)
        if best is not None:
            return f"the best weights (step {best})"
        return f"the current weights (step {trainer.global_step})"

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        store, batches = self._store, trainer.val_iterator
        if store is None or batches is None:
            return
        number = self._number
        self._number = (number[0] + 1, 0) if batches.ends_batch else (number[0], number[1] + 1)
        if trainer.is_padding or not _is_first_of_shard(trainer.backend.comm):
            return
        found = dict(flat(outputs))
        if not found:
            raise ConfigError(
                f"{type(model).__name__} returned no predictions: no tensor with one row per "
                f"sample (it returned: {', '.join(outputs) or 'nothing'}). Return the logits in "
                f"addition to the loss, or override compute_predictions."
            )
        marks = [] if self._weight is None else [batch[self._weight]]
        add = partial(_add, store, number, list(found))
        trainer.read([*found.values(), *marks], add)

    # ---- after the last batch

    def _finish(self, trainer: Trainer, store: PredictionStore) -> Predictions:
        """Return the predictions of all processes, in order. Collective.

        Raises:
            ConfigError: If outputs differ between processes.
            PredictionError: If files cannot be written.
        """
        comm = trainer.backend.comm
        is_complete = trainer.val_is_complete
        if not is_complete:
            log.warning(
                "predict was stopped. Number of batches with predictions: %d.", self._number[0]
            )
        facts = comm.gather_object((store.is_written, store.names))
        names = _same_names([found for _, found in facts])
        if any(is_written for is_written, _ in facts):
            return _in_files(store, names, comm, is_complete=is_complete)
        gathered = _gathered(store, comm)
        parts = {name: _joined([rows[name] for rows in gathered]) for name in names}
        return Predictions(parts, is_complete=is_complete)


def named_outputs(raw: Any) -> Outputs:
    """Return a model's output as a mapping, for predictions.

    A tensor is `output`, or `loss` if it has no dimension. A pair of a loss or None and something
    else is (loss, logits); other tuples and lists are `output_0`, `output_1` and so on.

    Raises:
        ConfigError: If it has another type.
    """
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, Tensor):
        return {"output" if raw.dim() else "loss": raw}
    if isinstance(raw, (tuple, list)):
        if len(raw) == 2 and (raw[0] is None or (isinstance(raw[0], Tensor) and not raw[0].dim())):
            return {"loss": raw[0], "logits": raw[1]}
        return {f"output_{number}": value for number, value in enumerate(raw)}
    raise ConfigError(
        f"The model returned a {type(raw).__name__}. To predict, return a tensor, a tuple of "
        f"tensors or a dict of tensors."
    )


def flat(outputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with dimensions of nested outputs, with names like `hidden_states.0`."""
    if isinstance(outputs, Tensor):
        if outputs.dim() and outputs.layout is torch.strided:
            yield name, outputs.detach()
        return
    inner: Collection[tuple[Any, Any]] = ()
    if isinstance(outputs, Mapping):
        inner = outputs.items()
    elif isinstance(outputs, (tuple, list)):
        inner = list(enumerate(outputs))
    for key, value in inner:
        yield from flat(value, f"{name}.{key}" if name else str(key))


def _add(store: PredictionStore, number: Number, names: list[str], values: list[Tensor]) -> None:
    """Add the rows of a batch, except padding."""
    rows: Rows = dict(zip(names, values, strict=False))
    if len(values) > len(names):
        is_sample = values[-1] != 0
        rows = {
            name: tensor[is_sample] if len(tensor) == len(is_sample) else tensor
            for name, tensor in rows.items()
        }
    store.add(number, rows)


def _is_first_of_shard(comm: Comm) -> bool:
    """Return whether this process is the first one with its data shard."""
    return comm.rank % (comm.world_size // comm.data_shard[1]) == 0


def _weight_of(loader: Loader) -> str | None:
    """Return the key of a batch that marks padding rows with 0; None = there are none.

    Raises:
        ConfigError: If padding rows are not marked.
    """
    collate: Any = getattr(loader, "collate_fn", None)
    if not hasattr(collate, "padding_weight"):  # as that of `PadLastBatch`
        return None
    weight: str | None = collate.padding_weight
    if weight is None:
        kind = type(collate).__name__
        raise ConfigError(
            f"predict cannot drop the padding rows that {kind} adds to the last batch of "
            f"dataloader: they are not marked. Pass {kind}(..., weight='weight')."
        )
    return weight


def _check_order(loader: Loader, comm: Comm) -> None:
    """Warn about shuffled, dropped or unordered samples.

    Raises:
        ConfigError: If samples may be repeated.
    """
    if not isinstance(loader, DataLoader):
        is_own = comm.data_shard[1] > 1 and split_of(loader, comm.data_shard, "dataloader") is None
    elif comm.data_shard[1] > 1 and is_split_already(loader):
        raise ConfigError(
            "dataloader has a sampler that shards the data over processes, which may repeat "
            "samples. Remove it: the trainer shards the data, and returns the predictions in "
            "order."
        )
    else:
        is_own = False
        if isinstance(loader.sampler, (RandomSampler, SeededSampler)):
            log.warning(
                "dataloader shuffles, so the predictions are in shuffled order, not in the order "
                "of the dataset. Set shuffle=False (shuffle: false in YAML)."
            )
        if drops_last(loader):
            log.warning("dataloader has drop_last=True, so the last samples get no prediction.")
    if is_own:
        log.warning(
            "dataloader (%s) yields different batches on each process, so the predictions are "
            "ordered by batch, then by process.",
            type(loader).__name__,
        )


def _same_names(found: list[Any]) -> list[str]:
    """Return the names of the outputs of all processes, each list of names or None."""
    names = [tuple(one) for one in found if one is not None]
    if any(set(one) != set(names[0]) for one in names):
        raise ConfigError(
            f"The model's outputs differ between processes: "
            f"{'; '.join(sorted({', '.join(one) for one in names}))}. Return the same outputs on "
            f"all processes."
        )
    return list(names[0]) if names else []


# ---- in memory


def _gathered(store: PredictionStore, comm: Comm) -> list[Rows]:
    """Return the rows of all processes, in the order of the data, in messages of bounded size."""
    if comm.world_size == 1:
        return [rows for _, rows in store.held]
    found: list[tuple[Number, int, Rows]] = []
    chunks = list(_chunks(store))
    num = max(comm.gather_object(len(chunks)))
    for chunk in [*chunks, *[[]] * (num - len(chunks))]:
        for rank, part in enumerate(comm.gather_object(chunk)):
            found += [(tuple(number), rank, rows) for number, rows in part]
    found.sort(key=lambda item: _order(item[0], item[1]))
    return [rows for _, _, rows in found]


def _order(number: Number, rank: int) -> tuple[int, int, int]:
    """Return the sort key of a micro-batch: by batch, process and micro-batch."""
    return number[0], rank, number[1]


def _chunks(store: PredictionStore) -> Iterator[list[tuple[Number, Rows]]]:
    """Yield what is in memory in lists of about the size of a message."""
    chunk: list[tuple[Number, Rows]] = []
    size = 0
    while store.held:
        chunk.append(store.held.popleft())
        size += sum(tensor.nbytes for tensor in chunk[-1][1].values())
        if size >= _MESSAGE_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _joined(column: list[Tensor]) -> list[OutputPart]:
    """Concatenate an output of all batches if shapes and types allow it."""
    if len({(tensor.shape[1:], tensor.dtype) for tensor in column}) == 1:
        return [OutputPart.of(torch.cat(column))]
    return [OutputPart.of(tensor) for tensor in column]


# ---- in files


def _in_files(
    store: PredictionStore, names: list[str], comm: Comm, *, is_complete: bool
) -> Predictions:
    """Write the remaining outputs, and the index of all processes' files."""
    store.write_rest()
    own = [(number, {name: tuple(place) for name, place in places.items()}) for
           number, places in store.written]  # fmt: skip
    files = [store.name_of(number) for number in range(store.num_files)]
    gathered = comm.gather_object((files, own))
    if comm.is_main:
        remove_earlier(store.folder)
    comm.barrier("earlier predictions removed")
    store.commit_files()
    comm.barrier("predictions renamed")
    if comm.is_main:
        all_files, outputs = _index(gathered, names)
        write_index(store.folder, all_files, outputs, is_complete=is_complete)
    comm.barrier("predictions written")
    log.info("Saved predictions to %s.", shown_path(store.folder))
    return Predictions.load(store.folder)


def _index(gathered: list[Any], names: list[str]) -> tuple[list[str], dict[str, list[RowsPlace]]]:
    """Return the files of all processes, and the places of each output, in order."""
    files: list[str] = []
    batches: list[tuple[tuple[int, int, int], dict[str, RowsPlace]]] = []
    for rank, (own_files, written) in enumerate(gathered):
        first = len(files)
        files += own_files
        for number, places in written:
            moved = {name: RowsPlace(first + file, *rest) for name, (file, *rest) in places.items()}
            batches.append((_order(tuple(number), rank), moved))
    batches.sort(key=lambda batch: batch[0])
    return files, {name: [places[name] for _, places in batches] for name in names}
