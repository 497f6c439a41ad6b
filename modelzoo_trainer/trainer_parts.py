"""What a trainer consists of: its callbacks and their hook table."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.callback import (
    Batch,
    Outputs,
    ValidationCallback,
)
from modelzoo_trainer.callback_list import checked_callbacks, core_callbacks, named
from modelzoo_trainer.core import (
    AutoRestart,
    Checkpoint,
    DataLoaderCallback,
    EarlyExit,
    GradientAccumulation,
    Logging,
    LoopCallback,
    LossAccumulation,
    Precision,
    Reproducibility,
    RunSchedule,
)
from modelzoo_trainer.core.artifact_dir import folder_of
from modelzoo_trainer.core.grad_accum import Weight, weight_of
from modelzoo_trainer.core.interrupt import Interrupt
from modelzoo_trainer.devices import LIMIT_BATCHES, from_environment
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.global_callbacks import global_callbacks, watch_global_callbacks
from modelzoo_trainer.hooks.model_hooks import ModelHooks, model_hooks
from modelzoo_trainer.hooks.spec import note_origin
from modelzoo_trainer.hooks.table import HookTable
from modelzoo_trainer.loading.epochs import Pass
from modelzoo_trainer.loggers.logger import Logger
from modelzoo_trainer.plugins import plugin_callbacks
from modelzoo_trainer.trainer_values import TrainerValues

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

T = TypeVar("T")

_SET_BY: Final = {
    "backend": "BackendCallback in pre_setup",
    "artifact_dir": "ArtifactDir in pre_setup",
    "summary_dir": "ArtifactDir in pre_setup",
    "model": "ModelCallback in setup",
    "compiled_model": "ModelCallback in setup",
    "optimizer": "OptimizerCallback in setup",
    "schedulers": "SchedulersCallback in setup",
    "global_step": "the loop in setup",
}
_ALIVE: weakref.WeakSet[TrainerParts] = weakref.WeakSet()


class CallbackHandle:
    """What takes an added callback out of its trainer again."""

    def __init__(self, parts: TrainerParts, callback: Any) -> None:
        self._parts = parts
        self._callback = callback

    def remove(self) -> None:
        """Take the callback out; a second call does nothing."""
        self._parts.remove_callback(self._callback)


class CallbacksByName(OrderedDict[str, Any]):
    """A trainer's callbacks by name, in order; it changes by the trainer's methods alone."""

    is_complete = False

    if not TYPE_CHECKING:  # else a checker would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            if name in ("append", "extend", "insert"):
                raise AttributeError(
                    f"trainer.callbacks is not a list and has no {name}. Use "
                    f"trainer.add_callback(callback), also for a pair such as ('post-loss', f)."
                )
            if name == "remove":
                raise AttributeError(
                    "trainer.callbacks is not a list and has no remove. Use "
                    "trainer.remove_callback(callback)."
                )
            return super().__getattribute__(name)  # raises what it should

    def __setitem__(self, name: str, callback: Any) -> None:
        """Refuse a callback that would never be called.

        Raises:
            TypeError: If the table is complete.
        """
        if self.is_complete:
            raise TypeError(
                f"trainer.callbacks[{name!r}] cannot be set. Use trainer.add_callback(callback)."
            )
        super().__setitem__(name, callback)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "trainer.callbacks cannot be changed. Use trainer.remove_callback(callback)."
        )

    __delitem__ = __ior__ = clear = move_to_end = pop = popitem = _refuse

    def __reduce__(self) -> Any:
        return type(self), (list(self.items()),)


class TrainerParts(TrainerValues):
    """Everything of a trainer but the sequence.

    Args:
        model_dir: Where everything is written.
        callbacks: The user's.
        loggers: Those that receive metrics.
        check_loss: Whether to add `CheckLoss()` where nobody else acts on a bad loss.
        core: The arguments of the core callbacks, by name.
    """

    # Set by core callbacks; see _SET_BY.
    artifact_dir: Path
    summary_dir: Path
    model: Module
    compiled_model: Module
    optimizer: Optimizer
    schedulers: list[Any]
    interrupted: str | None = None
    """What ended the last fit before its time: a signal's name such as "SIGINT", "stop file",
    "max_time"; None = nothing. Set by EarlyExit."""
    late_signal: str | None = None
    """The signal that came when the last fit was about to end anyway. Set by Interrupt."""
    raise_on_interrupt: bool = True
    """Whether `fit`, once it has ended in order, raises KeyboardInterrupt after Ctrl-C and
    SystemExit after SIGTERM. If not it returns, and `interrupted` tells."""
    is_fitting: bool = False
    """Whether a fit is under way, its validations included."""
    is_resuming: bool = False
    """Whether a fit is loading what it goes on from: at its start, or rolling back."""
    unsaved_attributes: Collection[str] = ()
    """Names of attributes of a subclass whose state is not to be in checkpoints, such as that of a
    large teacher that never changes."""
    metadata: list[dict[str, Any]] | None = None
    """What the checkpoint that was loaded says of its run. Set by ModelZooParamsMetadata."""
    val_is_complete: bool = True
    """Whether the validation at hand was not cut short. False while `on_validate_end` of a
    validation that a stop has cut short is called: its averages are none."""
    val_micro_batch_size: int | None = None
    """Most samples of a validation batch that go through the model at once; None = all."""

    def __init__(
        self,
        model_dir: str | Path,
        callbacks: Any,
        loggers: Any,
        *,
        check_loss: bool,
        core: Mapping[str, Any],
    ) -> None:
        super().__init__()
        folder = folder_of("model_dir", model_dir)
        self.model_dir = Path(os.path.abspath(folder))  # wherever the process goes
        self.callbacks: OrderedDict[str, Any] = CallbacksByName(core_callbacks(core))
        own = checked_callbacks(callbacks)
        self._default_check = _make_default_check(check_loss)
        installed = [*plugin_callbacks(checked_callbacks), *_limit_of_environment()]
        if self._default_check is not None:
            installed.insert(0, self._default_check)
        own += [callback for callback in installed if not any(callback is cb for cb in own)]
        self._user = [callback for callback in own if not isinstance(callback, Logger)]
        self.loggers: list[Logger] = [callback for callback in own if isinstance(callback, Logger)]
        for other in checked_callbacks(loggers, "loggers"):
            group: list[Any] = self.loggers if isinstance(other, Logger) else self._user
            if not any(other is known for known in group):
                group.append(other)
        self._model_hooks: list[ModelHooks] = []
        self.val_pass: Pass | None = None
        self._is_closed = False
        self._num_core = len(self.callbacks)
        self._bind_core()
        self.rebuild_hooks()
        watch_global_callbacks(self)
        this = cast("Trainer", self)
        try:
            self.hooks.pre_setup(this)
            self.hooks.setup(this)
            self._include_model_hooks()
            self.hooks.post_setup(this)
        except BaseException as error:
            note_origin(error, self.all_callbacks, step=None)
            self.close()
            raise
        if not _ALIVE:
            atexit.register(_close_all)
        _ALIVE.add(self)

    def _bind_core(self) -> None:
        core = self.callbacks
        self.reproducibility: Reproducibility = core["reproducibility"]
        self.precision: Precision = core["precision"]
        self.data: DataLoaderCallback = core["dataloader"]
        self.loop: LoopCallback = core["loop"]
        self.logging: Logging = core["logging"]
        self.grad_accum: GradientAccumulation = core["grad_accum"]
        self.loss_accum: LossAccumulation = core["loss_accum"]
        self.schedule: RunSchedule = core["run_schedule"]
        self.checkpoint: Checkpoint = core["checkpoint"]
        self.early_exit: EarlyExit = core["early_exit"]
        self.interruptions: Interrupt = core["interrupt"]
        self.autorestart: AutoRestart = core["autorestart"]

    if not TYPE_CHECKING:  # else a checker would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            if name in _SET_BY:
                raise AttributeError(f"trainer.{name} is not set yet: {_SET_BY[name]} sets it.")
            raise AttributeError(f"Trainer has no attribute {name!r}.")

    # ---- hooks and callbacks

    def call(self, hook_name: str, /, *args: Any, **kwargs: Any) -> None:
        """Fire a hook by name, declared or one's own.

        Args:
            hook_name: The hook; this trainer goes first to a declared one, and to listeners of
                one's own event whose first parameter is called `trainer`.
            args: The hook's arguments after the trainer.
            kwargs: Likewise by name; of one's own event each listener gets those that it names.

        Raises:
            HookError: If the name is nearly that of a declared hook and nobody has it, or the
                arguments do not fit.
        """
        self.hooks.call(self, hook_name, *args, **kwargs)

    def rebuild_hooks(self) -> None:
        """Make the hook table anew: core, user's, loggers, global, the model's own."""
        core = list(self.callbacks.values())[: self._num_core]
        user = self._without_second_check()
        by_name = list(self.callbacks.items())[: self._num_core]
        by_name += named([*user, *self.loggers]).items()
        self.callbacks = callbacks = CallbacksByName(by_name)
        callbacks.is_complete = True
        everybody = [*core, *user, *self.loggers, *global_callbacks()]
        known = set(map(id, everybody))
        everybody += [own for own in self._model_hooks if id(own.__wrapped__) not in known]
        unique = {id(callback): callback for callback in everybody}.values()
        self.log_hooks = HookTable(unique)
        self.quiet_hooks = HookTable(unique, is_log_step=False)
        self.hooks = self.log_hooks

    def _without_second_check(self) -> list[Any]:
        """Return the user's callbacks; the default `CheckLoss` only if nobody else does its job."""
        default = self._default_check
        if default is None:
            return self._user
        from modelzoo_trainer.callbacks import CheckLoss, SpikeDetection, TerminateOnNaN

        def does_its_job(callback: Any) -> bool:
            if isinstance(callback, SpikeDetection):
                return callback.finite_only
            return isinstance(callback, (CheckLoss, TerminateOnNaN))

        others = [callback for callback in self._user if callback is not default]
        is_given = any(map(does_its_job, (*others, *global_callbacks())))
        return others if is_given else self._user

    def _include_model_hooks(self) -> None:
        """Have the hooks called that the model itself defines: last, if it is no callback."""
        found = model_hooks(self.model)
        if found is not None:
            self._model_hooks = [found]
            self.rebuild_hooks()

    @property
    def rehearsal_hooks(self) -> HookTable:
        """The quiet hooks, with those of the traced step that are for log steps; made anew."""
        return HookTable(self.log_hooks.callbacks, is_log_step=False, rehearses=True)

    def add_callback(self, callback: Any) -> CallbackHandle:
        """Add a callback after those of its kind, and set it up.

        Args:
            callback: A callback or a logger.

        Returns:
            A handle whose `remove` takes it out again.

        Raises:
            HookError: If it does not fit.
        """
        [added] = checked_callbacks([callback])
        group: list[Any] = self.loggers if isinstance(added, Logger) else self._user
        if not any(added is known for known in group):
            group.append(added)
            self.rebuild_hooks()
            alone = HookTable([added])
            for hook in (alone.pre_setup, alone.setup, alone.post_setup):
                hook(cast("Trainer", self))
        return CallbackHandle(self, added)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback or logger of this trainer out; nothing happens if it has it not."""
        self._user = [known for known in self._user if known is not callback]
        self.loggers = [known for known in self.loggers if known is not callback]
        self.rebuild_hooks()

    def split_train_batches(self, micro_batch_size: int | None) -> None:
        """Train on batches in parts whose gradients add up to that of the batch.

        Args:
            micro_batch_size: Most samples that go through the model at once, > 0; None = all.
        """
        self.data.micro_batch_size = micro_batch_size
        self.grad_accum.activate()
        self.loss_accum.activate()
        self.rebuild_hooks()

    @property
    def all_callbacks(self) -> Iterator[Any]:
        """All callbacks in the order in which they are called."""
        return iter(self.hooks.callbacks)

    @property
    def validation_callbacks(self) -> list[ValidationCallback]:
        """The callbacks that run validations of their own."""
        return self.get_callbacks(ValidationCallback)  # type: ignore[type-abstract]  # a filter

    def get_callbacks(self, kind: type[T]) -> list[T]:
        """Return all callbacks of a type, global ones included."""
        return [callback for callback in self.all_callbacks if isinstance(callback, kind)]

    def get_callback(self, kind: type[T]) -> T | None:
        """Return the first callback of a type, or None."""
        return next(iter(self.get_callbacks(kind)), None)

    def get_callback_name(self, callback: Any) -> str:
        """Return the name of one of this trainer's callbacks.

        Raises:
            ValueError: If it is not one of them.
        """
        for name, known in self.callbacks.items():
            if known is callback:
                return name
        raise ValueError(f"{callback!r} is not a callback of this trainer.")

    def stateful_callbacks(self) -> list[tuple[str, Any]]:
        """Return those with state of their own, with their names in a checkpoint.

        The default `CheckLoss` is not among them: its state decides nothing, and checkpoints are
        the same with and without it.
        """
        left_out = set(map(id, list(self.callbacks.values())[: self._num_core]))
        left_out.add(id(self._default_check))
        own = [callback for callback in self.all_callbacks if id(callback) not in left_out]
        return [
            (name, callback)
            for name, callback in named(own).items()
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        ]

    @property
    def stateless_names(self) -> list[str]:
        """Names whose state a checkpoint may have, though this run saves none: the default check.

        A run from a file saves that of its `CheckLoss`.
        """
        default = self._default_check
        is_active = any(callback is default for callback in self.all_callbacks)
        return [type(default).__name__] if is_active else []

    # ---- where the run is

    @property
    def has_optimizer(self) -> bool:
        """Whether the trainer can train; one without an optimizer can only validate."""
        return "optimizer" in self.__dict__

    @property
    def should_run_optimizer_step(self) -> bool:
        """Whether the batch at hand completes a window of accumulation."""
        return self.grad_accum.should_run_optimizer_step

    @property
    def is_filler(self) -> bool:
        """Whether the batch at hand stands for nothing: others have data left, this process not."""
        return self.data.is_filler if self.val_pass is None else self.val_pass.is_filler

    def weight_of(self, outputs: Outputs, batch: Batch) -> Weight:
        """Return what the batch at hand counts in an average.

        Returns:
            `num_items` of the model's output, else the number of samples; 0 if it stands for
            nothing.
        """
        return 0 if self.is_filler else weight_of(outputs, batch)

    @property
    def is_first_iteration(self) -> bool:
        """Whether the batch at hand, or a part of it, is the first one of its pass."""
        if self.val_pass is not None:
            return self.val_pass.num_yielded <= 1
        return self.data.batch_idx <= self.data.ends_batch

    @property
    def is_final_iteration(self) -> bool:
        """Whether the batch at hand is the last one of its validation or train stage."""
        if self.val_pass is not None:
            return self.val_pass.is_last
        step = self.logging.step if self.logging.in_batch else self.global_step
        ends = step >= self.schedule.stage_end
        is_last = self.data.is_last and self.data.epoch + 1 >= self.schedule.end_epoch
        return self.should_run_optimizer_step and (ends or is_last)

    @property
    def logger(self) -> logging.Logger:
        """The Python logger that messages of a run go to."""
        return logging.getLogger("modelzoo_trainer")

    @property
    def is_tracing(self) -> bool:
        """Whether a traced step is under way."""
        return self.backend.in_step

    # ---- end

    def close(self) -> None:
        """Call `finalize` of every callback; a second call does nothing.

        Also done when the trainer is collected, when the process ends, and on leaving `with`.
        """
        if not self._is_closed:
            self._is_closed = True
            self.hooks.finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "hooks" in self.__dict__:
            self.close()


def _make_default_check(check_loss: bool) -> Any:
    """Return a `CheckLoss`, or None if it is not wanted.

    Raises:
        ConfigError: If `check_loss` is not a bool.
    """
    if not isinstance(check_loss, bool):
        raise ConfigError(
            f"check_loss is {check_loss!r}; it must be True or False. Pass a CheckLoss with "
            f"settings in callbacks."
        )
    if not check_loss:
        return None
    # All callbacks are imported with it, which takes as long as the trainer.
    from modelzoo_trainer.callbacks import CheckLoss

    return CheckLoss()


def _limit_of_environment() -> list[Any]:
    """Return the callback that limits passes if the environment asks for it, in a list."""
    if not from_environment(LIMIT_BATCHES):
        return []
    # All callbacks are imported with it: only for who asks.
    from modelzoo_trainer.callbacks.limit_batches import limit_of_environment

    return list(limit_of_environment())


def _close_all() -> None:
    for parts in tuple(_ALIVE):
        parts.close()
