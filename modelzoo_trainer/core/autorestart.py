"""Automatic restarts and the hang watchdog."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeInt, PositiveInt, Seconds, checked
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.core.parts.watchdog import RunPosition, Watchdog

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

STATE_KEY: Final = "__trainer_state__"
_STACKS: Final = "stacks{}.txt"
_NUM_WARMUP: Final = 2  # when the second batch has been fetched, the first is done
_HOOKS: Final = frozenset(
    {
        "on_enter_fit",
        "on_enter_validate",
        "on_before_load_checkpoint",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_end",
        "on_train_exception",
        "on_save_checkpoint",
        "postprocess_checkpoint",
    }
)


class AutoRestart(CoreCallback):
    """Restart a run that crashed, was killed or hangs; end hanging processes with a watchdog.

    Restarts require the command line: a supervisor process runs the command as a child and starts
    it again, to resume from the newest intact checkpoint. In a Python program there are no
    restarts, only the watchdog, if `hang_timeout` is given.

    The watchdog ends the process if the run makes no progress for too long, and writes the stacks
    of all threads to the run's folder.

    If restarts are enabled, `on_save_trainer_state` is called at each checkpoint, for state that
    only a restart needs. That hook and `on_load_trainer_state` are optional, unlike in the
    original: every checkpoint contains the `state_dict` of callbacks.

    Args:
        max_num_restarts: Maximum restarts in a row without progress, that is a later step or a
            newer checkpoint than in all earlier attempts; None or 0 = no restarts.
        min_num_csx: Accepted for compatibility; no effect on this hardware.
        hang_timeout: Seconds without a batch, > 0, that count as a hang; None = 60, or ten times
            the median step if that is longer. Increase it if callbacks take long.
        startup_timeout: The same for single long operations: start-up, the first step, writing a
            checkpoint, after the last batch; None = 1800.

    State: `__trainer_state__`, the output of `on_save_trainer_state`.

    Raises:
        ConfigError: If a number is out of range.
    """

    @checked("autorestart")
    def __init__(
        self,
        max_num_restarts: NonNegativeInt | None = None,
        min_num_csx: PositiveInt = 1,
        hang_timeout: Seconds | None = None,
        startup_timeout: Seconds | None = None,
    ) -> None:
        self.max_num_restarts = max_num_restarts or 0
        self.hang_timeout = hang_timeout
        self.startup_timeout = startup_timeout
        self.is_supervised = False
        """Whether a supervisor restarts the run when it fails."""
        self.is_restart = False
        """Whether this process resumes a run that has already written a checkpoint."""
        self.last_checkpoint: Path | None = None
        """The newest checkpoint of previous attempts, if known."""
        self.began: float | None = None
        """Start of the run on the monotonic clock, if before this process."""
        self._on_commit: Callable[[Path], None] | None = None
        self._trainer: Trainer | None = None
        self._num_marks = 0
        self._first_step = 0
        self._begun_at: int | None = None
        self._saving_at: int | None = None
        if not self.enabled and hang_timeout is None:
            self.idle_hooks = _HOOKS

    @property
    def enabled(self) -> bool:
        """Whether restarts are enabled."""
        return self.max_num_restarts > 0

    def supervise(
        self,
        *,
        is_restart: bool,
        last_checkpoint: Path | None,
        on_commit: Callable[[Path], None],
        began: float | None = None,
    ) -> None:
        """Configure a run that a supervisor restarts and watches from outside.

        `on_commit` is called with each committed checkpoint, before any other callback.
        """
        self.is_supervised = True
        self.is_restart = is_restart
        self.last_checkpoint = last_checkpoint
        self.began = began
        self._on_commit = on_commit

    def resume_run(self) -> None:
        """Mark this process as resuming the run of another one."""
        self.is_restart = True

    # ---- state of the trainer

    @override
    def postprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self.enabled:
            own: StateDict = {}
            trainer.hooks.on_save_trainer_state(trainer, own)
            state_dict[STATE_KEY] = own

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        own = state_dict.pop(STATE_KEY, None)
        if own is not None:
            trainer.hooks.on_load_trainer_state(trainer, own)

    # ---- progress

    def position(self) -> RunPosition:
        """Return where the run is, for the watchdog; called from its thread."""
        trainer = self._trainer
        if trainer is None:
            return RunPosition(self._num_marks)
        validation, data = trainer.val_iterator, trainer.data
        if validation is not None:
            num = validation.num_yielded
            is_steady = num >= _NUM_WARMUP and not validation.is_last
            return RunPosition((self._num_marks, id(validation)), num, is_steady=is_steady)
        num = data.num_batches
        is_steady = (
            self._begun_at is not None
            and num - self._begun_at >= _NUM_WARMUP
            and trainer.global_step > self._first_step
            and not data.is_last
            and num != self._saving_at
        )
        return RunPosition(self._num_marks, num, is_steady=is_steady)

    def note_progress(self) -> None:
        """Note that the run is not hanging, though it takes long."""
        self._mark()

    def _mark(self) -> None:
        self._num_marks += 1

    def _begin(self, trainer: Trainer) -> None:
        self._begun_at = trainer.data.num_batches
        self._mark()

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._watch(trainer, stack)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._trainer is None:
            self._watch(trainer, stack)

    def _watch(self, trainer: Trainer, stack: ExitStack) -> None:
        self._mark()
        self._trainer = trainer
        stack.callback(self._leave)
        if self.is_supervised or self.hang_timeout is None:
            return
        rank = trainer.backend.comm.rank
        watchdog = Watchdog(
            self.position,
            trainer.artifact_dir / _STACKS.format("" if rank == 0 else f"_{rank}"),
            hang_timeout=self.hang_timeout,
            startup_timeout=self.startup_timeout,
        )
        watchdog.start()
        stack.callback(watchdog.stop)

    def _leave(self) -> None:
        self._trainer = None
        self._mark()

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        self._begin(trainer)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._first_step = trainer.global_step
        self._mark()

    @override
    def on_train_start(
        self, trainer: Trainer, model: Any, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        self._begin(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self._begin(trainer)

    @override
    def on_train_end(self, trainer: Trainer, model: Any, loop: Any, loop_idx: int) -> None:
        self._begun_at = None
        self._mark()

    @override
    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._begun_at = None
        self._mark()

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._saving_at = trainer.data.num_batches
        self._mark()

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._on_commit is not None:
            self._on_commit(ckpt_path)
        self._saving_at = None
        self._mark()
        if self.enabled:
            trainer.hooks.on_after_save_trainer_state(trainer, ckpt_path)
