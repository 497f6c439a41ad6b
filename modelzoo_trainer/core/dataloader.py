"""The training data: passes, epochs, position."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import warn_of_changes, warn_of_renumbering
from modelzoo_trainer.loading.epochs import EpochIterator
from modelzoo_trainer.loading.per_sample import mixed, seed_generators
from modelzoo_trainer.loading.position import EpochSeeds, Position, ShardLayout, has_loader_state
from modelzoo_trainer.loading.sources import LoaderState
from modelzoo_trainer.loading.train_data import TrainData

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.data")

NOTHING: Final = object()


class DataLoaderCallback(CoreCallback):
    """Owns the position in the training data.

    Order and random numbers of a pass are functions of the run's seed and its number, so that a
    run that resumes in its middle takes exactly the batches that are left. How it gets there
    depends on the loader, see `loading/sources.py`: a torch DataLoader begins at the position, one
    with `state_dict()` and `load_state_dict()` gets its state back, a list is sliced, and of any
    other the batches that were trained on are loaded and dropped.

    Where fetching draws from the generators of this process, these are seeded when a batch is
    handed out: what a callback draws does not depend on how far ahead batches were fetched.

    `begins_epoch` says whether the next batch is the first that this fit takes of a pass,
    `is_last` whether the batch at hand is the last of one.

    With `micro_batch_size` the loader's batches are trained on in parts; `batch_idx` counts whole
    ones.

    With several processes a batch is what all of them take together, and `is_padding` and `is_even`
    tell of this one's part, see `loading/sharded_sources.py`. A run may resume with another number
    of them: it goes on after as many draws of the loader as all have consumed.

    State: `dataloader`: `epoch`, `batch_idx` (batches of the pass consumed), `num_batches`
        (forward passes since the start), `parts` (of the next batch, consumed), `loader` (the
        loader's own state; of several processes, `loader_0` and so on), `offset` (draws of the
        pass that all processes have consumed), `num_shards`, `per_batch` and `draw_size` (what
        these draws were), `passed_over`, `facts` (sizes of the data), `ends_epoch` (whether the
        pass before is over but for its end hook), and in the middle of a step `window`: where
        that began.
    """

    micro_batch_size: int | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.batch_idx = 0
        self.num_batches = 0
        self.is_last = False
        self.begins_epoch = True
        self.passed_over: set[tuple[int, int]] = set()
        self.owes_epoch_end = False
        """Whether a pass was over at the checkpoint, but its end hook had not been called."""
        self._parts = 0
        self._given: Loader = None
        self.is_pending = False
        """Whether there is a batch at hand that has not been trained on yet."""
        self.is_torn = False
        """Whether a fit was left in the middle of a step, and no state has been loaded since."""
        self._feed: TrainData | None = None
        self._max_batches: int | None = None
        self._pass: EpochIterator | None = None
        self._was_loaded = False
        self._restores = False
        self._loader_state: LoaderState | None = None
        self._facts: dict[str, Any] = {}
        self._window = Position()
        self._window_step: int | None = None
        self._numbering = ShardLayout()
        self._had_loader_state = False
        self._drops_window = False

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
        self._feed = TrainData(train_dataloader, limit, trainer.backend)
        self._settle(self._feed)
        self._window_step = None
        if train_dataloader is not self._given and not self._was_loaded:
            self._loader_state = None
        self._given = train_dataloader
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._loader_state = self._state_of_loader()
        self._forget_pass()
        if self._feed is not None:
            self._feed.close()
        self._feed = self._max_batches = None
        self.is_torn = self.is_torn or self.is_pending
        self._was_loaded = self.owes_epoch_end = self.is_pending = False

    @property
    def loader(self) -> Iterable[Batch] | None:
        """The dataloader of the fit at hand."""
        return None if self._feed is None else self._feed.loader

    def _forget_pass(self) -> None:
        self._pass = None
        self.begins_epoch = True

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if not self._was_loaded:
            self._restores = False
            if self.batch_idx or self._parts:
                self._go_on_to(self.epoch + 1)
                log.info(
                    "An earlier fit stopped within a pass; this one begins with pass %d. A new "
                    "trainer would go on where that stopped.",
                    self.epoch,
                )
        self._leave_out_passes()

    # ---- batches

    def split_batches(self, micro_batch_size: int | None) -> None:
        """Give out batches in micro-batches of at most this many samples; None = whole."""
        self.micro_batch_size = micro_batch_size

    def next_batch(self, trainer: Trainer) -> Batch:
        """Return the next training batch, on the device, and count it as consumed.

        Returns:
            The batch; `NOTHING` if all that was left of the epoch is skipped.

        Raises:
            ConfigError: If a pass has no batch.
        """
        if trainer.global_step != self._window_step:
            self._open_window(trainer.global_step)
        if self._pass is None:
            self._pass = self._begin(trainer)
            self.begins_epoch = False
        begun, feed = self._pass, self._feed
        assert feed is not None  # a pass has begun
        try:
            batch, self.is_last, idx = next(begun.items)
        except StopIteration:
            return self._after_nothing()
        if feed.host_seed is not None:
            seed_generators(mixed(feed.host_seed, idx, self._parts))
        if begun.ends_batch:
            self.batch_idx = idx + 1
            self._parts = 0
        else:
            self.batch_idx = idx
            self._parts += 1
        self.num_batches += 1
        self.is_pending = True
        return batch

    def end_epoch(self) -> None:
        """Go on to the next pass."""
        self._loader_state = self._state_of_loader()
        self._go_on_to(self.epoch + 1)
        self._leave_out_passes()

    def _go_on_to(self, epoch: int) -> None:
        self.epoch = epoch
        self._numbering = replace(self._numbering, first=0)
        self.batch_idx = self._parts = 0
        self._forget_pass()

    def _begin(self, trainer: Trainer) -> EpochIterator:
        feed = self._feed
        assert feed is not None  # there for the length of a fit
        if self._drops_window:
            self._drops_window = False
            trainer.grad_accum.drop(trainer)
        begun = feed.begin(
            self._position(),
            EpochSeeds.of(trainer.backend, self.epoch),
            self._skipped_here(),
            restores=self._restores,
            needs_sizes=self.micro_batch_size is not None,
        )
        facts = feed.facts()
        if self._restores:
            warn_of_changes(self._facts, facts)
        self._facts = facts
        self._restores = False
        return EpochIterator(
            begun,
            trainer.backend.batches,
            limit=feed.limit,
            micro_batch_size=self.micro_batch_size,
        )

    @property
    def ends_batch(self) -> bool:
        """Whether what is at hand is a whole batch of the loader, or the last part of one."""
        assert self._pass is not None  # there is a batch at hand
        return self._pass.ends_batch

    @property
    def num_parts(self) -> int:
        """In how many parts the loader's batch at hand is trained on."""
        assert self._pass is not None  # there is a batch at hand
        return self._pass.num_parts

    @property
    def is_padding(self) -> bool:
        """Whether the batch at hand stands for nothing: other processes have samples, not this."""
        return self._pass is not None and self._pass.is_padding

    @property
    def is_even(self) -> bool:
        """Whether all processes have as many samples at hand; the same on all, without asking."""
        return self._pass is None or self._pass.is_even

    def num_batches_per_pass(self) -> int | None:
        """Return how many batches a pass has, of all processes, as far as the loader tells."""
        num = None if self._feed is None else self._feed.num_batches()
        return num if num is None or self._max_batches is None else min(num, self._max_batches)

    def end_passes_after(self, num_batches: int, limited_by: str) -> None:
        """End the passes of the fit at hand after so many batches, where they would be longer.

        Called in `on_enter_fit`; of several calls the least number counts.

        Args:
            num_batches: Batches of all processes, > 0.
            limited_by: Who says so, for messages.
        """
        assert self._feed is not None  # a fit has been entered
        if self._feed.limit is None or num_batches < self._feed.limit:
            self._feed.limited_by = limited_by
        self._max_batches = min(num_batches, self._max_batches or num_batches)
        self._feed.limit = min(num_batches, self._feed.limit or num_batches)

    # ---- what is not trained on

    def skip_batches(self, batches: Iterable[tuple[int, int]]) -> None:
        """Leave batches out when their pass comes to them; they count as consumed.

        Args:
            batches: Number of the pass, and of the batch in it.
        """
        found = {(int(epoch), int(idx)) for epoch, idx in batches}
        self.passed_over |= found
        for epoch in sorted({epoch for epoch, _ in found}):
            numbers = ", ".join(str(idx) for other, idx in sorted(found) if other == epoch)
            log.info("Pass %d: not trained on from now on: batches %s.", epoch, numbers)
        self._leave_out_passes()

    def skip_samples(self, num: int) -> int:
        """Go on at least so many samples further, in whole batches; return how many they are.

        Between two batches of a step, the step is begun anew behind them.

        Args:
            num: Samples of all processes, > 0.

        Raises:
            ConfigError: If the loader does not tell how many samples a batch has.
        """
        feed = self._feed
        assert feed is not None  # there for the length of a fit
        size = feed.samples_per_batch()
        if not size:
            raise ConfigError(
                f"samples cannot be skipped: train_dataloader ({type(feed.loader).__name__}) does "
                f"not tell how many a batch has. Pass a torch DataLoader with a batch_size."
            )
        position = self._position()
        if self._window_step is not None:
            position, self._window_step = self._window, None
            self._drops_window = True
        num_batches = -(-num // size)
        moved = position.further(num_batches, feed.end)
        self.owes_epoch_end |= moved.epoch > position.epoch and position.batch_idx > 0
        self._go_to(moved)
        self._leave_out_passes()
        return num_batches * size

    def _skipped_here(self) -> frozenset[int]:
        return frozenset(idx for epoch, idx in self.passed_over if epoch == self.epoch)

    def _leave_out_passes(self) -> None:
        """Go on to the first pass that has something left."""
        if not self.passed_over or self._feed is None:
            return
        while self._feed.has_nothing_left(
            self.batch_idx, self._skipped_here(), self._numbering.first
        ):
            log.info("Pass %d: all that is left of it is passed over.", self.epoch)
            self.owes_epoch_end = self.owes_epoch_end or self.batch_idx > 0
            self._go_on_to(self.epoch + 1)
            self._loader_state = None

    def _after_nothing(self) -> Any:
        """Return `NOTHING`, if all that was left of the epoch is skipped.

        Raises:
            ConfigError: If the epoch has no batch.
        """
        if not any(idx >= self.batch_idx for idx in self._skipped_here()):
            raise ConfigError(self.explain_empty())
        return NOTHING

    def explain_empty(self) -> str:
        """Return why a pass has no batch."""
        assert self._feed is not None  # there for the length of a fit
        return self._feed.explain_empty(self.num_batches)

    # ---- state

    def _state_of_loader(self) -> LoaderState | None:
        if self._feed is None or self._pass is None:
            return self._loader_state
        return self._feed.state(None if self.is_last else self.batch_idx)

    def _position(self) -> Position:
        """Return where the run is; after the last batch of a pass at the beginning of the next."""
        loader, numbering = self._state_of_loader(), self._numbering
        if self._pass is not None and self.is_last:
            numbering = replace(numbering, first=0)
            return Position(self.epoch + 1, 0, self.num_batches, 0, loader, numbering)
        return Position(
            self.epoch, self.batch_idx, self.num_batches, self._parts, loader, numbering
        )

    def _go_to(self, position: Position) -> None:
        self.epoch, self.batch_idx = position.epoch, position.batch_idx
        self.num_batches, self._parts = position.num_batches, position.parts
        self._loader_state, self._numbering = position.loader, position.numbering
        self._restores = True
        self._forget_pass()

    def _open_window(self, step: int) -> None:
        self._window_step = step
        self._window = self._position()
        if self._feed is not None:
            self._feed.forget_before(self.batch_idx)

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
        """Go back to where the step at hand began: a run that resumes takes its batches again."""
        self.is_pending = False
        num = self.num_batches - self._window.num_batches
        if num and trainer.global_step == self._window_step:
            log.info("%d batches of a step that was not taken are given back.", num)
            self._go_to(self._window)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        position, index = self._position(), trainer.backend.comm.data_shard[0]
        state = position.state(index)
        state["passed_over"] = [list(place) for place in sorted(self.passed_over)]
        state["facts"] = dict(self._facts)
        state["ends_epoch"] = self.owes_epoch_end or (self._pass is not None and self.is_last)
        is_within = trainer.global_step == self._window_step
        if is_within and position.num_batches > self._window.num_batches:
            state["window"] = self._window.state(index)
        state_dict["dataloader"] = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state = state_dict.get("dataloader")
        if state is None:
            return
        index = trainer.backend.comm.data_shard[0]
        self._go_to(Position.from_state(state, index))
        is_used = self._feed is not None and self._feed.is_used
        known = {(epoch, idx) for epoch, idx in state.get("passed_over", ())}
        self._facts = dict(state.get("facts", {}))
        self.owes_epoch_end = state.get("ends_epoch", False)
        self._was_loaded = True
        self.is_pending = self.is_torn = False
        self._window_step = None
        if "window" in state:
            self._window_step = state_dict.get("global_step")
            self._window = Position.from_state(state["window"], index)
        self._had_loader_state = has_loader_state(state)
        before, self.passed_over = self.passed_over, known
        self._settle(self._feed)
        self.passed_over |= before if is_used else set()

    def _settle(self, feed: TrainData | None) -> None:
        """Count batches as this number of processes does, if a checkpoint's did otherwise."""
        if feed is None:
            return
        numbering = feed.numbering()
        if not self._was_loaded or numbering.is_like(self._numbering):
            self._numbering = replace(numbering, first=self._numbering.first)
            return
        position = self._position()
        if self._window_step is not None:
            position, self._window_step = self._window, None
            self._drops_window = True
        moved = position.renumbered(numbering)
        warn_of_renumbering(position, moved, self.passed_over, loses_state=self._had_loader_state)
        self.passed_over = set()
        self._go_to(moved)
        end = feed.end(moved.numbering.first)
        if end is not None and moved.offset and moved.batch_idx >= end:
            self.owes_epoch_end = True
            self._go_on_to(self.epoch + 1)
