"""The position in the training data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.loading.batch_seeds import mixed, seed_generators
from modelzoo_trainer.loading.dataset_info import (
    check_model,
    warn_of_changes,
    warn_of_new_layout,
    warn_of_other_workers,
)
from modelzoo_trainer.loading.epochs import EpochIterator
from modelzoo_trainer.loading.labels import FirstLabels
from modelzoo_trainer.loading.position import (
    EpochSeeds,
    LoaderState,
    Position,
    ShardLayout,
    has_loader_state,
)
from modelzoo_trainer.loading.train_data import TrainData

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.data")

NOTHING: Final = object()


class DataLoaderCallback(CoreCallback):
    """Own the position in the training data.

    Order and random numbers of an epoch are functions of the run's seed and the epoch, so that a
    run resumed mid-epoch trains on exactly the remaining batches. How it gets there depends on the
    loader, see `loading/sources.py`: a torch DataLoader starts at the position, one with
    `state_dict()` and `load_state_dict()` restores its state, a list is sliced, and any other
    loads and drops the consumed batches.

    If fetching uses the random generators of this process, they are seeded for each batch: what a
    callback draws does not depend on prefetching.

    `begins_epoch`: the next batch is the first one of an epoch in this fit. `is_last`: the current
    batch is the last one of an epoch. `skipped`: (epoch, index) of batches not trained on.

    With `micro_batch_size`, batches are split into micro-batches; `batch_idx` counts whole batches.

    With several processes a batch spans all of them, and `is_padding` and `is_even` describe the
    part of this rank, see `loading/sharding.py`. A run may resume with another number of
    processes: it continues after the items that all of them have consumed.

    State: `dataloader`: `epoch`, `batch_idx` (batches of the epoch consumed), `num_batches`
        (forward passes since the start), `parts` (micro-batches of the next batch consumed),
        `loader` (the loader's own state; of several processes, `loader_0` and so on), `offset`
        (items of the epoch that all processes have consumed), `num_shards`, `per_batch` and
        `draw_size` (what these items are), `samples_per_epoch` (only of a stream whose epochs
        follow each other, see `loading/stream.py`), `passed_over` (skipped batches), `facts` (sizes
        of the data), `ends_epoch` (whether the end hook of the previous epoch is still due), and
        within a step `window`: its start.
    """

    micro_batch_size: int | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.batch_idx = 0
        self.num_batches = 0
        self.is_last = False
        self.ends_batch = True
        """Whether the current batch is whole, or the last micro-batch of one; or there is none."""
        self.begins_epoch = True
        self.skipped: set[tuple[int, int]] = set()
        self.owes_epoch_end = False
        """Whether the checkpoint is at the end of an epoch, before its end hook."""
        self._parts = 0
        self._given: Loader = None
        self.is_pending = False
        """Whether the current batch has not been trained on yet."""
        self.is_torn = False
        """Whether a step was interrupted, and no state has been loaded since."""
        self._data: TrainData | None = None
        self._max_batches: int | None = None
        self._batches: EpochIterator | None = None
        self._host_seed: int | None = None  # of the current epoch
        self._was_loaded = False
        self._restores = False
        self._loader_state: LoaderState | None = None
        self._facts: dict[str, Any] = {}
        self._window = Position()
        self._window_step: int | None = None
        self._layout = ShardLayout()
        self._had_loader_state = False
        self._drops_window = False
        self._begins_run = False
        self._labels: FirstLabels | None = None
        self._left: dict[str, Any] | None = None
        """The state at the end of a fit that was interrupted or failed."""

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        steps = loop.steps_per_epoch
        limit = None if steps is None else steps * loop.grad_accum_steps
        self._data = TrainData(train_dataloader, limit, trainer.backend)
        self._adopt_layout(self._data)
        self._window_step = None
        if train_dataloader is not self._given and not self._was_loaded:
            self._loader_state = None
        elif isinstance(train_dataloader, Iterator):  # it cannot start again
            self._left = None
        self._given = train_dataloader
        stack.callback(self._leave, trainer)

    def _leave(self, trainer: Trainer) -> None:
        if trainer.schedule.is_unfinished and self._data is not None:
            self._left = copy.deepcopy(self._state(trainer, within_step=False))
        self._loader_state = self._state_of_loader()
        self._forget_batches()
        if self._data is not None:
            self._data.close()
        self._data = self._max_batches = None
        self.is_torn = self.is_torn or self.is_pending
        self._was_loaded = self.owes_epoch_end = self.is_pending = False

    @property
    def loader(self) -> Iterable[Batch] | None:
        """The dataloader of the current fit."""
        return None if self._data is None else self._data.loader

    @property
    def _of_fit(self) -> TrainData:
        if self._data is None:
            raise ConfigError(
                "trainer.data has no training data outside of fit. Use it in hooks of a fit, from "
                "on_enter_fit on."
            )
        return self._data

    def _forget_batches(self) -> None:
        self._batches = None
        self.begins_epoch = self.ends_batch = True

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._continue(trainer)
        self._begins_run, self._labels = not self._was_loaded, None
        if not self._was_loaded:
            self._restores = False
            if self.batch_idx or self._parts:
                self._start_epoch(self.epoch + 1)
                log.info(
                    "The previous fit ended mid-epoch; starting epoch %d. Create a new Trainer "
                    "to resume mid-epoch.",
                    self.epoch + 1,
                )
        self._skip_epochs()
        check_model(self._of_fit.loader, trainer.model)

    def _continue(self, trainer: Trainer) -> None:
        """Return to where the previous fit was interrupted, if this one continues it."""
        left, self._left = self._left, None
        if left is None or not trainer.schedule.continues(trainer):
            return
        is_torn = self.is_torn
        self._load(trainer, left)
        self.is_torn = is_torn
        log.info(
            "Continuing the previous fit, which stopped after batch %d of epoch %d.",
            self.batch_idx,
            self.epoch + 1,
        )

    # ---- batches

    def split_batches(self, micro_batch_size: int | None) -> None:
        """Yield micro-batches of at most this many samples; None = whole batches."""
        self.micro_batch_size = micro_batch_size

    def next_batch(self, trainer: Trainer) -> Batch:
        """Return the next training batch, on the device, and count it as consumed.

        Returns:
            The batch; `NOTHING` if the rest of the epoch is skipped.

        Raises:
            ConfigError: If an epoch has no batch.
        """
        if trainer.global_step != self._window_step:
            self._open_window(trainer.global_step)
        if self._batches is None:
            self._batches = self._begin(trainer)
            self.begins_epoch = False
        begun = self._batches
        try:
            batch, self.is_last, idx = next(begun.items)
        except StopIteration:
            return self._after_nothing()
        if self._labels is not None:
            labels, self._labels = self._labels, None
            labels.require_any(trainer.backend.comm)
        if self._host_seed is not None:
            seed_generators(mixed(self._host_seed, idx, self._parts))
        self.ends_batch = begun.ends_batch
        if self.ends_batch:
            self.batch_idx = idx + 1
            self._parts = 0
        else:
            self.batch_idx = idx
            self._parts += 1
        self.num_batches += 1
        self.is_pending = True
        if trainer.grad_accum.counts_batches:
            trainer.grad_accum.count(self)
        return batch

    def end_epoch(self) -> None:
        """Proceed to the next epoch."""
        self._loader_state = self._state_of_loader()
        self._start_epoch(self.epoch + 1)
        self._skip_epochs()

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._layout = replace(self._layout, first=0)
        self.batch_idx = self._parts = 0
        self._forget_batches()

    def _begin(self, trainer: Trainer) -> EpochIterator:
        data = self._of_fit
        if self._drops_window:
            self._drops_window = False
            trainer.grad_accum.drop(trainer)
        begun = data.begin(
            self._position(),
            EpochSeeds.of(trainer.backend, self.epoch),
            self._skipped_here(),
            restores=self._restores,
            needs_sizes=self.micro_batch_size is not None,
        )
        self._host_seed = data.host_seed
        facts = data.facts()
        if self._restores:
            warn_of_changes(self._facts, facts)
            warn_of_other_workers(self._facts, facts)
        self._facts = facts
        self._restores = False
        end = data.likely_end(self._layout.first)
        num_open = trainer.grad_accum.num_open
        num_left = None if end is None else max(end - self.batch_idx, 0) + num_open
        trainer.schedule.begin_epoch(trainer, num_left)
        return EpochIterator(
            begun,
            trainer.backend.batches,
            limit=data.limit,
            micro_batch_size=self.micro_batch_size,
            inspect=self._inspect(trainer),
        )

    def _inspect(self, trainer: Trainer) -> Callable[[Batch], None] | None:
        """Return what checks the first batch of an epoch; in a run's first batch, also labels."""
        check: Callable[[Batch], None] | None = getattr(trainer.model, "check_batch", None)
        if not self._begins_run:
            return check
        self._begins_run = False
        self._labels = FirstLabels(trainer.model)
        return self._labels.then(check)

    @property
    def num_parts(self) -> int:
        """The number of micro-batches of the current batch; 1 if there is none."""
        return 1 if self._batches is None else self._batches.num_parts

    @property
    def is_padding(self) -> bool:
        """Whether the current batch is a padding batch: only other ranks have samples."""
        return self._batches is not None and self._batches.is_padding

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of samples; equal on all ranks."""
        return self._batches is None or self._batches.is_even

    @property
    def is_between_epochs(self) -> bool:
        """Whether no batch of the current epoch has been consumed yet."""
        return not self.batch_idx and not self._parts

    def num_batches_per_epoch(self) -> int | None:
        """Return the number of batches per epoch over all processes; None = not known."""
        num = None if self._data is None else self._data.num_batches()
        return num if num is None or self._max_batches is None else min(num, self._max_batches)

    def samples_per_batch(self) -> int | None:
        """Return the number of samples per batch over all processes; None = not known."""
        try:
            return None if self._data is None else self._data.samples_per_batch()
        except ConfigError:  # a batch without a tensor
            return None

    def end_epochs_after(self, num_batches: int, limited_by: str) -> None:
        """Limit each epoch of the current fit to `num_batches` batches of all processes, > 0.

        Called in `on_enter_fit`; the smallest number wins. `limited_by`: for messages.

        Raises:
            ConfigError: Outside of a fit.
        """
        data = self._of_fit
        if data.limit is None or num_batches < data.limit:
            data.limited_by = limited_by
        self._max_batches = min(num_batches, self._max_batches or num_batches)
        data.limit = min(num_batches, data.limit or num_batches)

    # ---- skipped batches

    def skip_batches(self, batches: Iterable[tuple[int, int]]) -> None:
        """Skip batches, given as (epoch, index); they count as consumed."""
        found = {(int(epoch), int(idx)) for epoch, idx in batches}
        self.skipped |= found
        for epoch in sorted({epoch for epoch, _ in found}):
            numbers = ", ".join(str(idx) for other, idx in sorted(found) if other == epoch)
            log.info("Epoch %d: skipping batches %s.", epoch + 1, numbers)
        self._skip_epochs()

    def skip_samples(self, num: int) -> int:
        """Skip at least `num` samples, in whole batches; return the number skipped.

        Within a step, the step starts again after them. `num`: of all processes, > 0.

        Raises:
            ConfigError: If the number of samples per batch is not known; outside of a fit.
        """
        data = self._of_fit
        size = data.samples_per_batch()
        if not size:
            raise ConfigError(
                f"samples cannot be skipped: the batch size of train_dataloader "
                f"({type(data.loader).__name__}) is not known. Pass a torch DataLoader with a "
                f"batch_size."
            )
        position = self._position()
        if self._window_step is not None:
            position, self._window_step = self._window, None
            self._drops_window = True
        num_batches = -(-num // size)
        moved = position.further(num_batches, data.end)
        self.owes_epoch_end |= moved.epoch > position.epoch and position.batch_idx > 0
        self._go_to(moved)
        self._skip_epochs()
        return num_batches * size

    def _skipped_here(self) -> frozenset[int]:
        return frozenset(idx for epoch, idx in self.skipped if epoch == self.epoch)

    def _skip_epochs(self) -> None:
        """Proceed to the first epoch that is not skipped entirely."""
        if not self.skipped or self._data is None:
            return
        while self._data.has_nothing_left(self.batch_idx, self._skipped_here(), self._layout.first):
            log.info("Epoch %d: the rest is skipped.", self.epoch + 1)
            self.owes_epoch_end = self.owes_epoch_end or self.batch_idx > 0
            self._start_epoch(self.epoch + 1)
            self._loader_state = None

    def _after_nothing(self) -> Any:
        """Return `NOTHING`, if the rest of the epoch is skipped, or it ended early.

        Raises:
            ConfigError: If the epoch has no batch.
        """
        is_skipped = any(idx >= self.batch_idx for idx in self._skipped_here())
        if not self.batch_idx and not is_skipped:
            raise ConfigError(self.explain_empty())
        return NOTHING

    def explain_empty(self) -> str:
        """Return why an epoch has no batch."""
        return self._of_fit.explain_empty(self.num_batches)

    # ---- state

    def _state_of_loader(self) -> LoaderState | None:
        if self._data is None or self._batches is None:
            return self._loader_state
        if not self._data.keeps_state:
            return None
        return self._data.state(None if self.is_last else self.batch_idx)

    def _position(self) -> Position:
        """Return the position; after the last batch of an epoch, the start of the next."""
        loader, layout = self._state_of_loader(), self._layout
        if self._batches is not None and self.is_last:
            layout = replace(layout, first=0)
            return Position(self.epoch + 1, 0, self.num_batches, 0, loader, layout)
        return Position(self.epoch, self.batch_idx, self.num_batches, self._parts, loader, layout)

    def _go_to(self, position: Position) -> None:
        self.epoch, self.batch_idx = position.epoch, position.batch_idx
        self.num_batches, self._parts = position.num_batches, position.parts
        self._loader_state, self._layout = position.loader, position.layout
        self._restores = True
        self._forget_batches()

    def _open_window(self, step: int) -> None:
        self._window_step = step
        data = self._data
        if self._batches is None or self.is_last or data is None or data.keeps_state:
            self._window = self._position()
            if data is not None and data.keeps_state:
                data.forget_before(self.batch_idx)
        else:  # the common case
            at = self.epoch, self.batch_idx, self.num_batches, self._parts
            self._window = Position(*at, None, self._layout)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        self.is_pending = False

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.owes_epoch_end = False

    @override
    def on_step_discarded(self, trainer: Trainer) -> None:
        """Rewind to the start of the current step, so that a resumed run repeats its batches."""
        self.is_pending = False
        num = self.num_batches - self._window.num_batches
        if num and trainer.global_step == self._window_step:
            log.info("Batches of an incomplete step that will be trained on again: %d.", num)
            self._go_to(self._window)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state_dict["dataloader"] = self._state(trainer)

    def _state(self, trainer: Trainer, *, within_step: bool = True) -> dict[str, Any]:
        """Return the state; unless `within_step`, from the start of a step that has begun."""
        position, index = self._position(), trainer.backend.comm.data_shard[0]
        is_within = trainer.global_step == self._window_step
        is_within = is_within and position.num_batches > self._window.num_batches
        if is_within and not within_step:
            position = self._window
        state = position.state(index)
        state["passed_over"] = [list(place) for place in sorted(self.skipped)]
        state["facts"] = dict(self._facts)
        is_at_end = self._batches is not None and self.is_last and position is not self._window
        state["ends_epoch"] = self.owes_epoch_end or is_at_end
        if is_within and within_step:
            state["window"] = self._window.state(index)
        return state

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state = state_dict.get("dataloader")
        if state is not None:
            self._load(trainer, state, state_dict.get("global_step"))

    def _load(self, trainer: Trainer, state: StateDict, global_step: int | None = None) -> None:
        index = trainer.backend.comm.data_shard[0]
        self._go_to(Position.from_state(state, index))
        is_used = self._data is not None and self._data.is_used
        known = {(epoch, idx) for epoch, idx in state.get("passed_over", ())}
        self._facts = dict(state.get("facts", {}))
        self.owes_epoch_end = state.get("ends_epoch", False)
        self._was_loaded = True
        self.is_pending = self.is_torn = False
        self._window_step = None
        if "window" in state:
            self._window_step = global_step
            self._window = Position.from_state(state["window"], index)
        self._had_loader_state = has_loader_state(state, trainer.backend.comm.data_shard[1])
        before, self.skipped = self.skipped, known
        self._adopt_layout(self._data)
        self.skipped |= before if is_used else set()

    def _adopt_layout(self, data: TrainData | None) -> None:
        """Convert the position of a checkpoint to this number of processes and batch size."""
        if data is None:
            return
        layout = data.layout()
        if not self._was_loaded or layout.is_like(self._layout):
            self._layout = replace(layout, first=self._layout.first)
            return
        position = self._position()
        if self._window_step is not None:
            position, self._window_step = self._window, None
            self._drops_window = True
        moved = position.in_layout(layout)
        warn_of_new_layout(
            position,
            moved,
            self.skipped,
            loses_state=self._had_loader_state,
            divides_itself=data.divides_itself,
        )
        self.skipped = set()
        if moved.batch_idx and not position.batch_idx:  # of a stream: that epoch is not over here
            self.owes_epoch_end = False
        self._go_to(moved)
        data.set_epoch(self.epoch)
        end = data.end(moved.layout.first)
        if end is not None and moved.offset and moved.batch_idx >= end:
            self.owes_epoch_end = True
            self._start_epoch(self.epoch + 1)


def require_step_boundary(trainer: Trainer) -> None:
    """Check that a checkpoint can be saved now.

    Raises:
        CheckpointError: Within a step, or after one that an exception has interrupted.
    """
    if trainer.data.is_pending:
        raise CheckpointError(
            "save_checkpoint was called within a training step: a resumed run would lose its "
            "batch. Call it in on_train_batch_end or on_step_boundary."
        )
    if trainer.data.is_torn:
        raise CheckpointError(
            f"save_checkpoint: an error or a second Ctrl-C interrupted the step after global_step "
            f"{trainer.global_step}, so a run resumed from here would not reproduce the original "
            f"one. Load a checkpoint first. To keep only the weights, save "
            f"trainer.model.state_dict()."
        )
