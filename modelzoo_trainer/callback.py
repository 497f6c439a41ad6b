"""Base classes of callbacks; every hook of a run is declared here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias, TypeVar, overload

from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.base.constructor_arguments import keep_arguments
from modelzoo_trainer.base.foreign_names import explain_foreign
from modelzoo_trainer.errors import HookError
from modelzoo_trainer.hooks.global_callbacks import GlobalHandle, add_global
from modelzoo_trainer.hooks.interceptors import is_pair, split_pair
from modelzoo_trainer.hooks.spec import (
    HOOKS,
    Phase,
    check_listener,
    hook,
    instance_of,
    near_miss,
    register_hooks,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Batch: TypeAlias = Any  # what the user's dataloader yields
Outputs: TypeAlias = dict[str, Any]  # the model's output, normalised to a mapping
StateDict: TypeAlias = dict[str, Any]
Loader: TypeAlias = Any  # an iterable of batches, or a callable that returns one
Metrics: TypeAlias = dict[str, Any]
_SHIPPED: Final = "modelzoo_trainer."


class Callback:
    """Base class of all callbacks: override the hooks you need.

    A subclass is checked when it is defined: a misspelt hook, or one with other parameters than
    those it is called with, raises `HookError`. As a context manager, a callback is global inside
    the `with` block.

    State: Define `state_dict` and `load_state_dict` to save state in every checkpoint.
    """

    def __init_subclass__(cls, *, keeps_arguments: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_shipped = cls.__module__.startswith(_SHIPPED)
        if "__init__" in vars(cls) and is_shipped and keeps_arguments:
            keep_arguments(cls)
        register_hooks(cls)
        for base in cls.__mro__:  # mixins may define hooks too
            if base is not object and not vars(base).get("_hooks_checked"):
                check_listener(cls.__name__, vars(base))
        cls._hooks_checked = True

    log_step_hooks: frozenset[str] = frozenset()
    """Hooks of this callback that are called on log steps only.

    On a device that traces steps, hooks of the traced step are also called in two early steps
    of a fit, so that the graph of log steps is compiled early; nothing is logged there.
    """

    state_is_of_run: bool = False
    """Whether the state is meaningless to another run that starts from this run's checkpoint.

    It is restored only from checkpoints in the folder that the run itself writes to.
    """

    reads_outputs: tuple[str, ...] = ()
    """Names of outputs of the model that this callback reads, of those computed only on request.

    Such an output is `logits` of the language models: without a request, the loss is computed
    without the logits of all tokens. Outputs that a model always returns need not be named.
    """

    reads_weights_early: bool = False
    """Whether hooks that run before a checkpoint is loaded, such as `setup`, read weights.

    A class outside this package that has such a hook is assumed to, unless it sets this to False
    itself. If no callback does, a resuming run of a file draws no initial values.
    """

    needs_trainer: bool = False
    """Whether the callback requires a `Trainer`; `Hooks` refuses it in a custom loop."""

    needs_one_optimizer: bool = False
    """Whether a fit with several optimizers is refused: it would do nothing, or something wrong."""

    handles_bad_losses: bool = False
    """Whether the callback replaces the default `CheckLoss`."""

    shows_progress: bool = False
    """Whether the callback replaces the default `ProgressLogger`."""

    _hooks_checked: ClassVar[bool] = True
    _entered: ClassVar[dict[int, list[GlobalHandle]]] = {}

    def __enter__(self) -> Self:
        self._entered.setdefault(id(self), []).append(register_global_callback(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        handles = self._entered[id(self)]
        handles.pop().remove()
        if not handles:
            del self._entered[id(self)]

    # ---- setup and teardown

    @hook(Phase.RUN)
    def pre_setup(self, trainer: Trainer) -> None:
        """Called first when a trainer is built; seeds, device and folders are created here."""

    @hook(Phase.RUN)
    def setup(self, trainer: Trainer) -> None:
        """Called second when a trainer is built; creates model, optimizer and schedulers."""

    @hook(Phase.RUN)
    def post_setup(self, trainer: Trainer) -> None:
        """Called last when a trainer is built; everything exists."""

    @hook(Phase.RUN)
    def finalize(self) -> None:
        """Called once when the trainer is closed or garbage-collected, or the process ends."""

    # ---- fit

    @hook(Phase.RUN)
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Callback,
    ) -> None:
        """Called first in `fit`; what is entered on `stack` is exited when `fit` ends or raises."""

    @hook(Phase.RUN)
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Callback
    ) -> None:
        """Called after the checkpoint, if any, has been loaded and before the first train stage."""

    @hook(Phase.RUN)
    def on_fit_end(self, trainer: Trainer, loop: Callback) -> None:
        """Called after the last stage, also after a graceful stop; not after an exception."""

    @hook(Phase.RUN)
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Called when an exception leaves `fit`, before any context exits."""

    @hook(Phase.RUN)
    def on_fit_committed(self, trainer: Trainer, loop: Callback) -> None:
        """Called after all `on_fit_end` hooks, when all deferred values have been read."""

    @hook(Phase.RUN)
    def on_interrupt(self, trainer: Trainer, reason: str) -> None:
        """Called at the step boundary at which a signal ends the run.

        Args:
            trainer: The trainer.
            reason: The signal's name, such as "SIGINT".
        """

    # ---- train stages: the training between two validations

    @hook(Phase.RUN)
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Callback,
        loop_idx: int,
    ) -> None:
        """Called first in a train stage; what is entered on `stack` is exited at its end."""

    @hook(Phase.RUN)
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Callback,
        loop_idx: int,
    ) -> None:
        """Called before the first batch of a train stage."""

    @hook(Phase.RUN)
    def on_train_ready(self, trainer: Trainer) -> None:
        """Called when all state has been restored and training is about to start.

        That is after all `on_train_start` hooks; after a rollback; and in a resumed run, before the
        validation or the end of the epoch that the checkpoint still has pending.
        """

    @hook(Phase.RUN)
    def on_rollback(self, trainer: Trainer, ckpt_path: Path) -> None:
        """Called before a run rolls back to a checkpoint from before a bad step.

        Drop partial results here; the state is restored by `on_load_checkpoint`.

        Args:
            trainer: The trainer.
            ckpt_path: The checkpoint.
        """

    @hook(Phase.RUN)
    def on_train_end(self, trainer: Trainer, model: Module, loop: Callback, loop_idx: int) -> None:
        """Called after the last batch of a train stage; not after an exception."""

    @hook(Phase.RUN)
    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Called when an exception leaves a train stage."""

    @hook(Phase.RUN)
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Called when an epoch begins or is resumed.

        Args:
            trainer: The trainer.
            epoch: The epoch, counted from 0.
        """

    @hook(Phase.RUN)
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called when an epoch is complete.

        Args:
            trainer: The trainer.
            epoch: The epoch, counted from 0.
        """

    # ---- one training batch

    @hook(Phase.BATCH)
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        """Called before the step of a batch, on the host."""

    @hook(Phase.BATCH)
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        """Called after the step of a batch, on the host; `global_step` already counts it."""

    @hook(Phase.BATCH)
    def on_step_boundary(self, trainer: Trainer) -> None:
        """Called after all `on_train_batch_end` hooks of a batch with an optimizer step.

        State is consistent here: checkpoints, stops and validations are decided here.
        """

    @hook(Phase.BATCH)
    def on_step_committed(self, trainer: Trainer) -> None:
        """Called after all `on_step_boundary` hooks, before the run may stop.

        The step is final: a checkpoint that is due is written here.
        """

    @hook(Phase.BATCH)
    def on_step_discarded(self, trainer: Trainer) -> None:
        """Called when a stop has interrupted a step: its batches will be trained on again.

        Drop what was collected for the next optimizer step here.
        """

    @hook(Phase.STEP)
    def on_train_step_start(self, trainer: Trainer, model: Module, batch: Batch) -> None:
        """Called first inside the step of a training batch."""

    @hook(Phase.STEP)
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the step of a training batch, after the optimizer step, if any."""

    @hook(Phase.STEP)
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Called inside autocast; modify `args` and `kwargs` in place to change the call."""

    @hook(Phase.STEP)
    def on_after_forward(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called inside autocast; `outputs` may be modified in place."""

    @hook(Phase.STEP)
    def on_before_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        """Called before the backward pass; setting `outputs["loss"]` changes the update."""

    @hook(Phase.STEP)
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        """Called after the backward pass; gradients may still be scaled and incomplete."""

    @hook(Phase.STEP)
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called with the complete, unscaled, unclipped gradients."""

    @hook(Phase.STEP)
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called after the parameters were updated; gradients still exist, clipped."""

    @hook(Phase.STEP)
    def on_before_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called before the gradients are zeroed."""

    @hook(Phase.STEP)
    def on_after_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called after the gradients were zeroed."""

    @hook(Phase.STEP)
    def on_before_scheduler_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer, scheduler: Any
    ) -> None:
        """Called before the step of each scheduler."""

    @hook(Phase.STEP)
    def on_after_scheduler_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer, scheduler: Any
    ) -> None:
        """Called after the step of each scheduler."""

    # ---- validation

    @hook(Phase.RUN)
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Callback,
        ckpt_paths: list[Any],
    ) -> None:
        """Called first in the validation of several dataloaders or checkpoints."""

    @hook(Phase.RUN)
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Callback
    ) -> None:
        """Called first in the validation of one dataloader, in a test and in a prediction.

        Args:
            trainer: The trainer.
            stack: What is entered on it ends with the validation, whatever happens.
            val_dataloader: The dataloader.
            loop: Its `hook` names the hooks that are called: "predict" in a prediction.
        """

    @hook(Phase.RUN)
    def on_validate_start(
        self, trainer: Trainer, model: Module, val_dataloader: Loader, loop: Callback
    ) -> None:
        """Called before the first batch of a validation."""

    @hook(Phase.RUN)
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Callback) -> None:
        """Called after the last batch of a validation; not after an exception."""

    @hook(Phase.RUN)
    def on_validate_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Called when an exception leaves a validation."""

    @hook(Phase.BATCH)
    def on_validate_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        """Called before the step of a validation batch, on the host."""

    @hook(Phase.BATCH)
    def on_validate_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        """Called after the step of a validation batch, on the host."""

    @hook(Phase.STEP)
    def on_validate_step_start(self, trainer: Trainer, model: Module, batch: Batch) -> None:
        """Called first inside the step of a validation batch."""

    @hook(Phase.STEP)
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the step of a validation batch."""

    @hook(Phase.RUN)
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        """Called after the dataloaders of a validation, to run custom validations.

        Args:
            trainer: The trainer.
            loop_idx: Index of the preceding train stage; None outside `fit`.
            is_last: Whether it is the last validation of the run.
        """

    # ---- prediction: `on_enter_validate` and `on_validate_exception` are called there as well

    @hook(Phase.RUN)
    def on_predict_start(
        self, trainer: Trainer, model: Module, dataloader: Loader, loop: Callback
    ) -> None:
        """Called before the first batch of a prediction."""

    @hook(Phase.RUN)
    def on_predict_end(self, trainer: Trainer, model: Module, loop: Callback) -> None:
        """Called after the last batch of a prediction; not after an exception."""

    @hook(Phase.BATCH)
    def on_predict_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        """Called before the step of a batch of a prediction, on the host."""

    @hook(Phase.BATCH)
    def on_predict_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        """Called after the step of a batch of a prediction, on the host."""

    @hook(Phase.STEP)
    def on_predict_step_start(self, trainer: Trainer, model: Module, batch: Batch) -> None:
        """Called first inside the step of a prediction batch."""

    @hook(Phase.STEP)
    def on_predict_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the step of a prediction batch."""

    # ---- checkpoints

    @hook(Phase.RUN)
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to add to `state_dict`, in place, what is to be saved.

        Before training continues, the method `saving_end()` of callbacks is called, if defined (a
        custom event): the checkpoint is written, has failed, or is being written in the background.
        """

    @hook(Phase.RUN)
    def postprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with the complete `state_dict` before it is written; modify it in place."""

    @hook(Phase.RUN)
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        """Called when a checkpoint of the run has been committed, not one of `SaveBest` etc."""

    @hook(Phase.RUN)
    def on_save_trainer_state(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to add to `state_dict` state that only an automatic restart needs."""

    @hook(Phase.RUN)
    def on_after_save_trainer_state(self, trainer: Trainer, trainer_state_file: Path) -> None:
        """Called when the state for an automatic restart has been committed."""

    @hook(Phase.RUN)
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        """Called before a checkpoint is read; None if there is no checkpoint to load."""

    @hook(Phase.RUN)
    def on_load_trainer_state(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with the state of `on_save_trainer_state`, if the checkpoint has it."""

    @hook(Phase.RUN)
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with the content of a checkpoint before it is used; modify it in place."""

    @hook(Phase.RUN)
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to restore state from the content of a checkpoint."""

    # ---- metrics

    @hook(Phase.BATCH)
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        """Called when metric values are available on the host, possibly some steps later.

        Args:
            trainer: The trainer.
            metrics: Host values by name, with the name scopes.
            step: The `global_step` that they belong to.
        """


register_hooks(Callback)


class CoreCallback(Callback):
    """Base class of the callbacks that own a part of the trainer's state."""

    idle_hooks: frozenset[str] = frozenset()
    """Hooks that this instance, as configured, does not need; they are not called."""


class ValidationCallback(Callback, ABC):
    """Base class of custom validations, which do more than evaluate a dataloader.

    `run_validation` runs in the name scope `name_scope`, which prefixes the metrics that it logs.
    `is_due` returns whether it should run.
    """

    _is_in_scope: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("run_validation")
        if own is not None:
            cls.run_validation = _in_name_scope(own)  # type: ignore[method-assign]

    @property
    @abstractmethod
    def name_scope(self) -> str:
        """Prefix of the metrics that it logs; "" = none."""

    @property
    @abstractmethod
    def every_n_vals(self) -> int:
        """Run on every n-th validation of a run, and on the last one."""

    @property
    @abstractmethod
    def num_validate_loops(self) -> int:
        """Number of validation loops per run."""

    def is_due(self, loop_idx: int | None, is_last: bool) -> bool:
        """Return whether to run, by `every_n_vals`.

        Args:
            loop_idx: Index of the preceding train stage; None (outside `fit`) = due.
            is_last: Whether it is the last validation of the run; True = due.
        """
        return loop_idx is None or is_last or (loop_idx + 1) % self.every_n_vals == 0

    @abstractmethod
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        """Run the validation, if `is_due`.

        Args:
            trainer: The trainer.
            loop_idx: Index of the preceding train stage; None outside `fit`.
            is_last: Whether it is the last validation of the run.
        """


def _in_name_scope(run_validation: Callable[..., None]) -> Callable[..., None]:
    """Wrap `run_validation` in the callback's name scope; nested calls by `super()` reuse it."""

    @wraps(run_validation)
    def run(
        self: ValidationCallback, trainer: Trainer, loop_idx: int | None, is_last: bool
    ) -> None:
        if self._is_in_scope:
            run_validation(self, trainer, loop_idx, is_last)
            return
        scope = self.name_scope
        self._is_in_scope = True
        try:
            with trainer.name_scope(scope) if scope else nullcontext():
                run_validation(self, trainer, loop_idx, is_last)
        finally:
            self._is_in_scope = False
        trainer.drain()  # deliver its metrics: nothing may follow

    return run


C = TypeVar("C", bound=type)


@overload
def register_global_callback(callback: C) -> C: ...
@overload
def register_global_callback(callback: Any) -> GlobalHandle: ...


def register_global_callback(callback: Any) -> Any:
    """Add a callback to every trainer of the process, after all other callbacks.

    Args:
        callback: An instance; a class without constructor arguments (so this can be used as a
            decorator); or an event and a function, such as `("post-forward", f)`.

    Returns:
        A handle whose `remove` removes the callback. For a class, the class, with the handle as
        its attribute `global_callback_handle`.

    Raises:
        HookError: If it has no hook, or an invalid one.
        ConfigError: If a function does not fit an existing trainer.
    """
    if isinstance(callback, type):
        handle = register_global_callback(callback())
        callback.global_callback_handle = handle  # type: ignore[attr-defined]  # documented
        return callback
    if is_pair(callback):
        split_pair(callback, "register_global_callback")
    else:
        check_callback(callback)
    return add_global(callback)


def hook_names(callback: Any, *, is_log_step: bool = True, rehearses: bool = False) -> list[str]:
    """Return the names of the declared hooks that `callback` overrides.

    Args:
        callback: The callback.
        is_log_step: Whether to include the hooks for log steps only.
        rehearses: Whether to include hooks of the traced step in any case.
    """
    names = _overridden(type(callback))
    if not isinstance(callback, Callback):
        names |= {name for name in HOOKS if callable(getattr(callback, name, None))}
    if isinstance(callback, CoreCallback):
        names -= callback.idle_hooks
    if not is_log_step:
        for_log_steps: frozenset[str] = getattr(callback, "log_step_hooks", frozenset())
        names -= {name for name in for_log_steps if not (rehearses and _is_traced(name))}
    return [name for name in HOOKS if name in names]


def _overridden(kind: type) -> set[str]:
    """Return the declared hooks that a class, or one of its bases, has of its own."""
    own = set().union(*[vars(base) for base in kind.__mro__ if base is not Callback])
    declared = {name: HOOKS[name].default for name in HOOKS.keys() & own}
    return {name for name, method in declared.items() if getattr(kind, name, method) is not method}


def _is_traced(name: str) -> bool:
    return name in HOOKS and HOOKS[name].phase is Phase.STEP


def check_callback(callback: Any, where: str = "callbacks") -> None:
    """Check that an object can be used as a callback.

    Args:
        callback: A `Callback`, or any object with hook methods.
        where: Name of the argument, for messages.

    Raises:
        HookError: If it is a class, or one of another trainer, a hook was set on a `Callback`
            instance, the name or the parameters of a hook are invalid, or an object that is not a
            `Callback` has neither a hook nor a method that may be a custom event.
    """
    kind = type(callback).__name__
    given = callback if isinstance(callback, type) else type(callback)
    foreign = "" if issubclass(given, Callback) else explain_foreign(given)
    if foreign:
        raise HookError(f"{where}: {foreign}")
    if isinstance(callback, type):
        raise HookError(
            f"{where} got the class {callback.__name__}. Pass an instance: {instance_of(callback)}."
        )
    if isinstance(callback, Callback):
        late = HOOKS.keys() & vars(callback).keys()
        if late:
            raise HookError(
                f"{kind}: the hook {min(late)} was set on the instance, where it is not called. "
                f"Define it in the class."
            )
        return
    for base in type(callback).__mro__[:-1]:
        check_listener(kind, vars(base))
    names = [name for name in dir(callback) if not name.startswith("_")]
    if not any(name in HOOKS or name.startswith("on_") for name in names):
        _check_own_events(callback, kind, where)


def _check_own_events(callback: Any, kind: str, where: str) -> None:
    """Check an object without hooks: its methods may be custom events."""
    own = [] if where == "loggers" else _own_methods(callback)
    likely = [f"on_{name}" for name in own]
    meant = [name if name in HOOKS else near_miss(name) for name in likely]
    if own and None not in meant:
        raise HookError(f"{kind}.{own[0]} is not a hook. Did you mean {meant[0]!r}?")
    if not own:
        advice = (
            "Pass instances of loggers, such as modelzoo_trainer.loggers.TensorBoardLogger()."
            if where == "loggers"
            else "Subclass modelzoo_trainer.Callback, or define a method such as "
            "on_train_batch_end."
        )
        raise HookError(f"{where} got {callback!r} of type {kind}, which has no hook. {advice}")


_METHODS: Final = (FunctionType, staticmethod, classmethod)


def _own_methods(callback: Any) -> list[str]:
    """Return the methods that may be custom events: public methods of user-defined classes.

    An object of a built-in or torch class, such as an optimizer, was not meant as a callback.
    """
    bases = type(callback).__mro__[:-1]
    if any(base.__module__.partition(".")[0] in ("builtins", "torch") for base in bases):
        return []
    return [
        name
        for base in bases
        for name, value in vars(base).items()
        if not name.startswith("_") and isinstance(value, _METHODS)
    ]
