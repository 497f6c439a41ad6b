"""The schedule of a fit: its train stages and validations, and where they end."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.core.loop import EPOCH, TrainingLoop
from modelzoo_trainer.core.parts.run_hints import log_hints, refuse_short
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.schedule")


def _resets_on_fit(callback: Any) -> bool:
    return getattr(callback, "reset_on_fit", None) is True


def ends_stage(trainer: Trainer) -> bool:
    """Return whether the current batch is the last one of its train stage."""
    step = trainer.logging.step if trainer.logging.in_batch else trainer.global_step
    data, schedule = trainer.data, trainer.schedule
    is_last = data.is_last and data.epoch + 1 >= schedule.stage_end_epoch
    return trainer.should_run_optimizer_step and (step >= schedule.stage_end or is_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a fit: training, or a validation on all dataloaders."""

    trains: bool
    is_last: bool = False
    """Whether no train stage follows."""


class RunSchedule(CoreCallback):
    """Divide a fit into train stages, each followed by a validation if configured.

    All positions are functions of `global_step` and the epoch, so that a resumed run validates
    and ends at the same steps as an uninterrupted one. If a checkpoint is between a stage and its
    validation, the resumed run starts with that validation.

    With `num_epochs` only the epochs end a fit, as their lengths may differ. Where the length is
    needed in advance, the remaining epochs are taken to be as long as the current one.

    A fit that was interrupted or failed is continued by the next one, unless that loads a
    checkpoint, or its `ckpt_path` is None.

    State: `schedule`: the step and the epoch at which the fit started, its `num_steps`, the number
        of completed stages, the step of the last completed validation, and the progress of the
        next one.
    """

    def __init__(self) -> None:
        self.loop: TrainingLoop | None = None
        self.end_step: float = math.inf
        """The step of `num_steps` or `max_steps`, where the fit ends in any case."""
        self.end_epoch: float = math.inf
        self.likely_end: float = math.inf
        """The step at which the fit ends if the remaining epochs are as long as the current one."""
        self._end_of_epochs: float = math.inf
        self.is_continued = False
        """Whether the current fit continues the previous one of this trainer."""
        self.batches_per_epoch: int | None = None
        self.steps_per_epoch: int | None = None
        """Of the current fit; None = not known."""
        self.stage_end: float = math.inf
        self.stage_end_epoch: float = math.inf
        self._every: int | None = None
        self._divided: TrainingLoop | None = None  # the loop that set `_every`
        self._is_by_epoch = False
        self._origin: tuple[int, int] | None = None
        self.loop_idx = 0
        """Number of completed stages of this fit, including those before a restart."""
        self._validated: int | None = None
        self.num_validated = 0
        """How many dataloaders the validation of the current stage has finished."""
        self.is_unfinished = False
        """Whether the previous fit was interrupted or failed."""
        self._previous: list[tuple[Any, Any]] = []
        """Callbacks that start each fit without state, and their states before this fit."""
        self._has_fitted = self._was_loaded = self._has_ended = False
        self._has_ended_here = False
        self._num_steps: int | None = None  # of the fit that a checkpoint belongs to
        self._is_begun = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self.loop = loop
        self._was_loaded = False
        resetting = [one for _, one in trainer.stateful_callbacks() if _resets_on_fit(one)]
        self._previous = [(one, copy.deepcopy(one.state_dict())) for one in resetting]
        stack.callback(self._leave)

    def _leave(self) -> None:
        self.stage_end = self.stage_end_epoch = math.inf
        if self._is_begun:
            self.is_unfinished = not self._has_ended
        self._is_begun = False
        self._has_fitted = True

    def continues(self, trainer: Trainer) -> bool:
        """Return whether the fit that starts continues the previous one of this trainer."""
        return self.is_unfinished and trainer.checkpoint.is_own and not self._was_loaded

    def _forget(self) -> None:
        """Forget the previous fit."""
        self._origin = self._validated = self._num_steps = None
        self.loop_idx = self.num_validated = 0
        self._has_ended_here = False

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._begin_or_continue(trainer)
        self.batches_per_epoch = (
            None if loop.steps_per_epoch is None else loop.steps_per_epoch * loop.grad_accum_steps
        )
        self.steps_per_epoch = self._length_of_epoch(trainer, loop)
        self._set_ends(trainer, loop)
        if not self.is_continued or self._divided is not loop:
            self._every = self._stage_length(loop, self.origin_step)
        self._divided = loop
        self._is_by_epoch = loop.eval_frequency == EPOCH
        self._num_steps = loop.num_steps
        self._is_begun, self._has_ended = True, False
        if not self.has_steps_left(trainer):
            log.info("Nothing to do: the run is complete at step %d.", trainer.global_step)
        refuse_short(trainer)
        log_hints(trainer, val_dataloader)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self._has_ended = trainer.interrupted is None

    def _begin_or_continue(self, trainer: Trainer) -> None:
        self.is_continued = self.continues(trainer)
        previous, self._previous = self._previous, []
        for callback, state in previous if self.is_continued else ():
            callback.load_state_dict(state)
        if self._has_fitted and not (self._was_loaded or self.is_continued):
            self._forget()
        self.is_unfinished = False
        if self._origin is None:
            self._origin = (trainer.global_step, trainer.data.epoch)
        if self._validated is None:
            self._validated = trainer.global_step

    def _set_ends(self, trainer: Trainer, loop: TrainingLoop) -> None:
        self.end_epoch = self.end_step = self._end_of_epochs = math.inf
        if loop.num_steps is not None:
            self.end_step = self._first_step(trainer, loop.num_steps) + loop.num_steps
        elif loop.max_steps is not None:
            self.end_step = loop.max_steps
        assert self._origin is not None  # set when a fit starts
        origin_step, origin_epoch = self._origin
        if loop.num_epochs is not None:
            self.end_epoch = origin_epoch + loop.num_epochs
            if self.steps_per_epoch is not None:
                self._end_of_epochs = origin_step + loop.num_epochs * self.steps_per_epoch
        self.likely_end = min(self.end_step, self._end_of_epochs)

    def _first_step(self, trainer: Trainer, num_steps: int) -> int:
        """Return the first step of a fit of `num_steps`; an interrupted one takes the rest.

        A checkpoint of an earlier version has no `num_steps`: if all steps are taken, its fit
        counts as finished.
        """
        assert self._origin is not None  # set when a fit starts
        step, origin_step = trainer.global_step, self._origin[0]
        checkpoint, planned = trainer.checkpoint, self._num_steps
        is_finished = (
            checkpoint.is_own
            and not trainer.autorestart.is_restart  # a process that failed after its fit
            and checkpoint.begins_finished(trainer)
        )
        num_left = origin_step + num_steps - step
        is_rest = num_left > 0 or (num_left == 0 and planned == num_steps)
        if checkpoint.is_own and is_rest and not is_finished:
            self._warn_of_change(num_steps, step, end=origin_step + num_steps)
            return origin_step
        if is_finished:
            self._validated = step
            self.loop_idx = self.num_validated = 0
        else:
            if checkpoint.is_own:
                self._warn_of_change(num_steps, step, end=step + num_steps)
            ends = (num_steps, planned) if checkpoint.is_own else (num_steps,)
            self._has_ended_here = step - origin_step in ends
        self._origin = (step, trainer.data.epoch)
        return step

    def _warn_of_change(self, num_steps: int, step: int, *, end: int) -> None:
        assert self._origin is not None  # set when a fit starts
        if self._num_steps is not None and self._num_steps != num_steps:
            log.warning(
                "The checkpoint is of a fit with loop.num_steps %d that started at step %d and was "
                "interrupted at step %d. loop.num_steps is now %d, so the fit ends at step %d.",
                self._num_steps,
                self._origin[0],
                step,
                num_steps,
                end,
            )

    def _length_of_epoch(self, trainer: Trainer, loop: TrainingLoop) -> int | None:
        num = trainer.data.num_batches_per_epoch()
        if num == 0 and loop.num_epochs is not None:
            raise ConfigError(trainer.data.explain_empty())
        steps = None if num is None else math.ceil(num / loop.grad_accum_steps)
        if loop.steps_per_epoch is None:
            return steps
        return loop.steps_per_epoch if steps is None else min(steps, loop.steps_per_epoch)

    def _stage_length(self, loop: TrainingLoop, origin_step: int) -> int | None:
        frequency = loop.eval_frequency
        if not frequency or frequency == EPOCH:
            return None
        if not isinstance(frequency, float):
            return frequency
        if frequency == 1.0:
            return None
        if math.isinf(self.likely_end):
            raise ConfigError(
                f"loop.eval_frequency is {frequency}, a fraction, but the length of the run is "
                f"unknown (train_dataloader has no len()). Set loop.max_steps, or make "
                f"eval_frequency an integer number of steps."
            )
        begin = 0 if loop.max_steps is not None and loop.num_steps is None else origin_step
        return max(1, math.ceil(frequency * (self.likely_end - begin)))

    def begin_epoch(self, trainer: Trainer, num_left: int | None) -> None:
        """Update the likely end of the fit, when an epoch has begun and its length is known.

        `num_left`: its batches that are not trained on yet, including a started step's;
        None = not known.
        """
        loop = self.loop
        assert loop is not None  # of a fit
        if num_left is None or math.isinf(self.end_epoch):
            return
        per_epoch = self.steps_per_epoch = self._length_of_epoch(trainer, loop)
        num_later = self.end_epoch - trainer.data.epoch - 1
        if per_epoch is not None:
            num_here = math.ceil(num_left / loop.grad_accum_steps)
            self._end_of_epochs = trainer.global_step + num_here + num_later * per_epoch
            self.likely_end = min(self.end_step, self._end_of_epochs)

    # ---- queries

    @property
    def total_steps(self) -> int | None:
        """The likely end of the fit; None = not known."""
        return None if math.isinf(self.likely_end) else int(self.likely_end)

    @property
    def origin_step(self) -> int:
        """The `global_step` at which the fit started, before any restart."""
        return 0 if self._origin is None else self._origin[0]

    @property
    def validates(self) -> bool:
        """Whether validations follow the train stages."""
        return self.loop is not None and bool(self.loop.eval_frequency)

    @property
    def likely_stage_end(self) -> float:
        """The step at which the current train stage ends, if the length of an epoch is known."""
        if self.steps_per_epoch is None or not self._is_by_epoch or self._origin is None:
            return min(self.stage_end, self.likely_end)
        if math.isinf(self.end_epoch):
            step, epoch = self._origin
            end = step + (self.stage_end_epoch - epoch) * self.steps_per_epoch
        else:
            num_later = self.end_epoch - self.stage_end_epoch
            end = self._end_of_epochs - num_later * self.steps_per_epoch
        return min(self.stage_end, self.likely_end, end)

    @property
    def validates_every(self) -> int | None:
        """Steps between two validations of the fit; None = there is only one, at the end."""
        return self.steps_per_epoch if self._is_by_epoch else self._every

    def has_steps_left(self, trainer: Trainer) -> bool:
        """Return whether another train stage follows."""
        return (
            trainer.global_step < self.end_step
            and trainer.data.epoch < self.end_epoch
            and not trainer.early_exit.should_exit
        )

    def is_finished(self, trainer: Trainer) -> bool:
        """Return whether the fit has completed, without interruption."""
        return self._is_over(trainer) and trainer.interrupted is None

    def _is_over(self, trainer: Trainer) -> bool:
        return trainer.global_step >= self.end_step or trainer.data.epoch >= self.end_epoch

    def num_stages_left(self, step: int) -> int | None:
        """Return how many train stages end at a step or later; None = not known.

        Args:
            step: At most the last one.
        """
        if math.isinf(self.likely_end):
            return None
        every, begin = self._every, 0
        if self._is_by_epoch:
            every, begin = self.steps_per_epoch, self.origin_step
        if every is None:
            return 1
        return math.ceil((self.likely_end - begin) / every) - (step - begin - 1) // every

    def owes_validation(self, trainer: Trainer) -> bool:
        """Return whether the validation of a stage that ended here is still due."""
        step = trainer.global_step
        if not self.validates or step == self._validated or trainer.early_exit.should_exit:
            return False
        if self._is_by_epoch and trainer.data.is_between_epochs:
            return True
        return (
            self._is_over(trainer)
            or self._has_ended_here
            or (self._every is not None and step % self._every == 0)
        )

    def stages(self, trainer: Trainer) -> Iterator[Stage]:
        """Yield the train stages and validations of a fit, lazily.

        A fit resumed between a stage and its validation starts with the validation.
        """
        trainer.early_exit.stop_if_requested(trainer)
        if self.owes_validation(trainer):
            trainer.hooks.on_train_ready(trainer)
            yield from self._validation(trainer)
        while self.has_steps_left(trainer):
            yield Stage(trains=True)
            if self.validates and not trainer.early_exit.should_exit:
                if self._is_by_epoch and trainer.global_step == self._validated:
                    continue  # the whole epoch was skipped
                yield from self._validation(trainer)

    def _validation(self, trainer: Trainer) -> Iterator[Stage]:
        yield Stage(trains=False, is_last=not self.has_steps_left(trainer))
        self._end_stage(
            trainer, is_validated=not trainer.early_exit.should_exit and trainer.val_is_complete
        )
        if self.has_steps_left(trainer):
            trainer.early_exit.stop_if_requested(trainer)

    def count_validation(self) -> None:
        """Count a dataloader as validated."""
        self.num_validated += 1

    def _end_stage(self, trainer: Trainer, *, is_validated: bool) -> None:
        """Count a stage, unless its validation is incomplete and still due."""
        if is_validated:
            self._validated = trainer.global_step
            self._has_ended_here = False
            self.num_validated = 0
            self.loop_idx += 1

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._begin_stage(trainer)

    @override
    def on_train_ready(self, trainer: Trainer) -> None:
        self._begin_stage(trainer)  # after a rollback, at another step

    def _begin_stage(self, trainer: Trainer) -> None:
        """Set the end of the current stage: here, if its validation is due."""
        self.stage_end_epoch = self.end_epoch
        if self._is_by_epoch:
            self.stage_end_epoch = min(self.end_epoch, trainer.data.epoch + 1)
        if self.owes_validation(trainer):
            self.stage_end = trainer.global_step
            return
        self.stage_end = self.end_step
        if self._every is not None:
            due = (trainer.global_step // self._every + 1) * self._every
            self.stage_end = min(self.end_step, due)

    def stage_continues(self, trainer: Trainer) -> bool:
        """Return whether the stage has another batch; between epochs, apply stop requests."""
        if trainer.data.begins_epoch:
            trainer.early_exit.stop_if_requested(trainer)
        return (
            trainer.global_step < self.stage_end
            and trainer.data.epoch < self.stage_end_epoch
            and not trainer.early_exit.should_exit
        )

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._origin is not None and (self._is_begun or self.is_unfinished):
            step, epoch = self._origin
            state_dict["schedule"] = {
                "origin_step": step,
                "origin_epoch": epoch,
                "num_steps": None if self.loop is None else self.loop.num_steps,
                "loop_idx": self.loop_idx,
                "validated_step": self._validated,
                "num_validated": self.num_validated,
            }

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state = state_dict.get("schedule")
        if not trainer.is_resuming:
            self.is_unfinished = False  # the position is now another one
        elif not self._is_begun:
            self._was_loaded = True
            self._forget()
        if state is not None and (trainer.is_resuming or not self._has_fitted):
            origin = (whole_number(state, "origin_step"), whole_number(state, "origin_epoch"))
            if self._is_begun and origin != self._origin:  # rolled back to the start of this fit
                self.loop_idx = self.num_validated = 0
                return
            self._origin = origin
            self._num_steps = whole_number(state, "num_steps", None)
            self.loop_idx = whole_number(state, "loop_idx", 0)  # the first format has neither
            self._validated = whole_number(state, "validated_step", None)
            self.num_validated = whole_number(state, "num_validated", 0)
