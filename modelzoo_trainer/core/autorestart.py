"""Automatic restarts and the hang watchdog."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.constraints import NonNegativeInt, PositiveInt, Seconds, checked
from modelzoo_trainer.watchdog import Position, Watchdog

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
    """Restarts of a run that crashed, was killed or hangs, and the watchdog that finds the last.

    The command line restarts: a run whose file asks for it becomes the child of a supervisor,
    which starts the same command again, and that resumes from the newest intact checkpoint. In a
    Python program nobody restarts; there the watchdog alone is at work, if `hang_timeout` is given.

    The watchdog ends the process when the run has made no progress for too long, and writes the
    stacks of all threads into its folder.

    Enabled, `on_save_trainer_state` is called at each checkpoint, for what only a restart needs.
    Nobody has to have that hook or `on_load_trainer_state`, unlike in the original: what a callback
    has in its `state_dict` is in every checkpoint.

    Args:
        max_num_restarts: Most restarts in a row without progress, which is a later step or a newer
            checkpoint than any attempt before had; None or 0 = none at all.
        min_num_csx: Accepted for the format's sake; without meaning on this hardware.
        hang_timeout: Seconds without a batch, > 0, that are a hang; None = 60, or ten times the
            median step if that is more. To be raised where a callback's work at a step takes long.
        startup_timeout: Likewise where a single act may take long: at start-up, for the first
            step, while a checkpoint is written, after the last batch; None = 1800.

    State: `__trainer_state__`, what `on_save_trainer_state` collected.

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
        """Whether a supervisor starts the run again when it fails."""
        self.is_restart = False
        """Whether this process continues a run that has written a checkpoint before."""
        self.last_checkpoint: Path | None = None
        """The newest checkpoint that the run wrote before this process, if it is known."""
        self.began: float | None = None
        """Instant of the monotonic clock when the run began, if before this process."""
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
        """Whether restarts are asked for."""
        return self.max_num_restarts > 0

    def supervise(
        self,
        *,
        is_restart: bool,
        last_checkpoint: Path | None,
        on_commit: Callable[[Path], None],
        began: float | None = None,
    ) -> None:
        """Note that a supervisor restarts the run, and watches it from outside.

        `on_commit` is called with each checkpoint that has been committed, before anybody else
        hears of it and may fail.
        """
        self.is_supervised = True
        self.is_restart = is_restart
        self.last_checkpoint = last_checkpoint
        self.began = began
        self._on_commit = on_commit

    def resume_run(self) -> None:
        """Note that this process continues a run that another one began."""
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

    def position(self) -> Position:
        """Return where the run is, for the watchdog; called from its thread."""
        trainer = self._trainer
        if trainer is None:
            return Position(self._num_marks)
        validation, data = trainer.val_iterator, trainer.data
        if validation is not None:
            num = validation.num_yielded
            is_steady = num >= _NUM_WARMUP and not validation.is_last
            return Position((self._num_marks, id(validation)), num, is_steady=is_steady)
        num = data.num_batches
        is_steady = (
            self._begun_at is not None
            and num - self._begun_at >= _NUM_WARMUP
            and trainer.global_step > self._first_step
            and not data.is_last
            and num != self._saving_at
        )
        return Position(self._num_marks, num, is_steady=is_steady)

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
