"""The callbacks' base classes: every hook of a run, declared once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias, TypeVar, overload

from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.errors import HookError
from modelzoo_trainer.hooks.global_callbacks import GlobalHandle, add_global
from modelzoo_trainer.hooks.spec import (
    HOOKS,
    Phase,
    check_listener,
    hook,
    near_miss,
    register_hooks,
)
from modelzoo_trainer.interceptors import is_pair, split_pair

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Batch: TypeAlias = Any  # whatever the user's loader yields
Outputs: TypeAlias = dict[str, Any]  # the model's output, normalised to a mapping
StateDict: TypeAlias = dict[str, Any]
Loader: TypeAlias = Any  # an iterable of batches, or a callable that returns one
Metrics: TypeAlias = dict[str, Any]


class Callback:
    """Base class of all that takes part in a run: override the hooks you need.

    A subclass is checked when it is defined: a misspelt hook or one with other parameters than it
    is called with is a `HookError`. Used as a context manager, a callback is global inside.

    State: Define `state_dict` and `load_state_dict` and it is in every checkpoint.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_hooks(cls)
        for base in cls.__mro__:  # mixins bring hooks as well
            if base is not object and not vars(base).get("_hooks_checked"):
                check_listener(cls.__name__, vars(base))
        cls._hooks_checked = True

    log_step_hooks: frozenset[str] = frozenset()
    """Hooks of this callback that have nothing to do but on log steps: called on those only.

    Those of the traced step are also called in two steps in the beginning of a fit on a device that
    records steps, so that the graph of log steps is compiled then; nothing is logged there.
    """

    state_is_of_run: bool = False
    """Whether its state means nothing to another run, which begins with this one's checkpoint.

    It is given back only by checkpoints in the folder that the run writes its own to.
    """

    needs_trainer: bool = False
    """Whether it would do nothing in a loop of one's own: `Hooks` refuses it."""

    needs_one_optimizer: bool = False
    """Whether a fit with several optimizers is refused: it would do nothing, or something wrong."""

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

    # ---- set-up and end of a trainer

    @hook(Phase.RUN)
    def pre_setup(self, trainer: Trainer) -> None:
        """Called first when a trainer is built; seeds, device and folders are made here."""

    @hook(Phase.RUN)
    def setup(self, trainer: Trainer) -> None:
        """Called second when a trainer is built; model, optimizer and schedulers are made here."""

    @hook(Phase.RUN)
    def post_setup(self, trainer: Trainer) -> None:
        """Called last when a trainer is built; everything exists."""

    @hook(Phase.RUN)
    def finalize(self) -> None:
        """Called once when the trainer is closed, collected, or the process ends."""

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
        """Called first in `fit`; what is entered on `stack` ends with it, whatever happens."""

    @hook(Phase.RUN)
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Callback
    ) -> None:
        """Called when a checkpoint, if any, has been loaded, before the first train stage."""

    @hook(Phase.RUN)
    def on_fit_end(self, trainer: Trainer, loop: Callback) -> None:
        """Called after the last stage, also after an early exit; not after an exception."""

    @hook(Phase.RUN)
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Called when an exception leaves `fit`, before anything unwinds."""

    @hook(Phase.RUN)
    def on_fit_committed(self, trainer: Trainer, loop: Callback) -> None:
        """Called after everybody's `on_fit_end`, when all values have been delivered."""

    @hook(Phase.RUN)
    def on_interrupt(self, trainer: Trainer, reason: str) -> None:
        """Called at the step boundary at which a signal ends the run.

        Args:
            trainer: The trainer.
            reason: The signal's name, such as "SIGINT".
        """

    # ---- train stages: the stretches between validations

    @hook(Phase.RUN)
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Callback,
        loop_idx: int,
    ) -> None:
        """Called first in a train stage; what is entered on `stack` ends with the stage."""

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
        """Called when all state is restored, and nothing but data is between here and training.

        That is after everybody's `on_train_start`; after a roll-back; and where a run resumes,
        before the validation or the end of an epoch that it owes.
        """

    @hook(Phase.RUN)
    def on_rollback(self, trainer: Trainer, ckpt_path: Path) -> None:
        """Called before a run goes back to a checkpoint from before a bad step.

        Whatever is under way is dropped here; the state comes back by `on_load_checkpoint`.

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
        """Called when a pass over the training data begins (or is taken up again).

        Args:
            trainer: The trainer.
            epoch: Number of whole passes before this one.
        """

    @hook(Phase.RUN)
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called when a pass over the training data is complete.

        Args:
            trainer: The trainer.
            epoch: Number of whole passes before this one.
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
        """Called after the step of a batch, on the host; `global_step` counts it already."""

    @hook(Phase.BATCH)
    def on_step_boundary(self, trainer: Trainer) -> None:
        """Called after everybody's `on_train_batch_end` of a batch with an optimizer step.

        State is consistent here. Checkpoints, stops and evaluations are decided here.
        """

    @hook(Phase.BATCH)
    def on_step_committed(self, trainer: Trainer) -> None:
        """Called after everybody's `on_step_boundary`, before the run may stop.

        Nothing of the step changes any more: a checkpoint that is due is written here.
        """

    @hook(Phase.BATCH)
    def on_step_discarded(self, trainer: Trainer) -> None:
        """Called when a stop has cut off a step: its batches will be trained on again.

        Whatever was collected for the optimizer step to come is dropped here.
        """

    @hook(Phase.STEP)
    def on_train_step_start(self, trainer: Trainer, model: Module, batch: Batch) -> None:
        """Called first inside the traced step."""

    @hook(Phase.STEP)
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the traced step, after the optimizer's step if there was one."""

    @hook(Phase.STEP)
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Called inside autocast; change `args` and `kwargs` in place to change the call."""

    @hook(Phase.STEP)
    def on_after_forward(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called inside autocast; `outputs` may be changed in place."""

    @hook(Phase.STEP)
    def on_before_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        """Called before the backward pass; setting `outputs["loss"]` changes the update."""

    @hook(Phase.STEP)
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        """Called after the backward pass; gradients may still be scaled and partial."""

    @hook(Phase.STEP)
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called with whole, unscaled, unclipped gradients."""

    @hook(Phase.STEP)
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called after the parameters were updated; gradients are still there, clipped."""

    @hook(Phase.STEP)
    def on_before_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called before the gradients are dropped."""

    @hook(Phase.STEP)
    def on_after_optimizer_zero_grad(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        """Called after the gradients were dropped."""

    @hook(Phase.STEP)
    def on_before_scheduler_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer, scheduler: Any
    ) -> None:
        """Called once per scheduler, before its step."""

    @hook(Phase.STEP)
    def on_after_scheduler_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer, scheduler: Any
    ) -> None:
        """Called once per scheduler, after its step."""

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
        """Called first in a validation of several dataloaders or checkpoints."""

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
        """Called first inside the traced validation step."""

    @hook(Phase.STEP)
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the traced validation step."""

    @hook(Phase.RUN)
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        """Called after the dataloaders of a validation, for validations of one's own.

        Args:
            trainer: The trainer.
            loop_idx: The train stage that the validation follows; None outside `fit`.
            is_last: Whether it is the last one of the run.
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
        """Called first inside the traced step of a prediction."""

    @hook(Phase.STEP)
    def on_predict_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        """Called last inside the traced step of a prediction."""

    # ---- checkpoints

    @hook(Phase.RUN)
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to add to `state_dict`, in place, what is to be saved."""

    @hook(Phase.RUN)
    def postprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with the whole `state_dict` before it is written; change it in place."""

    @hook(Phase.RUN)
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        """Called when a checkpoint has been committed."""

    @hook(Phase.RUN)
    def on_save_trainer_state(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to add to `state_dict` what only an automatic restart needs."""

    @hook(Phase.RUN)
    def on_after_save_trainer_state(self, trainer: Trainer, trainer_state_file: Path) -> None:
        """Called when the state for an automatic restart has been committed."""

    @hook(Phase.RUN)
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        """Called before a checkpoint is read; with None if none will be."""

    @hook(Phase.RUN)
    def on_load_trainer_state(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with what `on_save_trainer_state` collected, if the checkpoint has it."""

    @hook(Phase.RUN)
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called with a checkpoint's content before it is used; change it in place."""

    @hook(Phase.RUN)
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Called to restore state from a checkpoint's content."""

    # ---- metrics

    @hook(Phase.BATCH)
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        """Called when metric values have arrived on the host, perhaps some steps late.

        Args:
            trainer: The trainer.
            metrics: Names, with their scopes, and host values.
            step: The `global_step` that they belong to.
        """


register_hooks(Callback)


class CoreCallback(Callback):
    """Base class of the callbacks that own a part of the trainer's state."""

    idle_hooks: frozenset[str] = frozenset()
    """Hooks that this instance, as it was configured, has no use for: they are not called."""


class ValidationCallback(Callback, ABC):
    """Base class of validations that are more than a pass over a dataloader.

    What `run_validation` of a subclass logs has `name_scope` before its name, as that is open
    while it runs; `is_due` says whether it is its turn.
    """

    _is_in_scope: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("run_validation")
        if own is not None:
            cls.run_validation = _in_name_scope(own)  # type: ignore[method-assign]  # the same, scoped

    @property
    @abstractmethod
    def name_scope(self) -> str:
        """Prefix of the metrics that it logs; "" = none."""

    @property
    @abstractmethod
    def every_n_vals(self) -> int:
        """It runs at every n-th validation of a run, and at the last one."""

    @property
    @abstractmethod
    def num_validate_loops(self) -> int:
        """Number of validation loops that one of its runs takes."""

    def is_due(self, loop_idx: int | None, is_last: bool) -> bool:
        """Return whether `every_n_vals` has it run.

        Args:
            loop_idx: The train stage that the validation follows; None outside `fit`: due.
            is_last: Whether it is the last one of the run: due.
        """
        return loop_idx is None or is_last or (loop_idx + 1) % self.every_n_vals == 0

    @abstractmethod
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        """Run the validation, if `is_due`.

        Args:
            trainer: The trainer.
            loop_idx: The train stage that the validation follows; None outside `fit`.
            is_last: Whether it is the last one of the run.
        """


def _in_name_scope(run_validation: Callable[..., None]) -> Callable[..., None]:
    """Return a method that runs in its callback's name scope; within `super()`, in that one."""

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
        trainer.drain()  # what it has logged: it may be the last that happens

    return run


C = TypeVar("C", bound=type)


@overload
def register_global_callback(callback: C) -> C: ...
@overload
def register_global_callback(callback: Any) -> GlobalHandle: ...


def register_global_callback(callback: Any) -> Any:
    """Make a callback part of every trainer of the process, after all others.

    Args:
        callback: An instance, or a class that needs no arguments (so it can decorate one); or an
            event and its function, such as `("post-forward", f)`.

    Returns:
        A handle whose `remove` takes it back; for a class, the class, with the handle as
        its attribute `global_callback_handle`.

    Raises:
        HookError: If it has no hook, or one that does not fit.
        ConfigError: If it is a function that does not fit the trainers that there are.
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


def hook_names(
    callback: Any, *, is_log_step: bool = True, rehearses: bool = False
) -> Iterator[str]:
    """Yield the names of the declared hooks that `callback` listens to.

    Args:
        callback: The callback.
        is_log_step: Whether to include those that are for log steps only.
        rehearses: Include those of the traced step in any case.
    """
    idle: frozenset[str] = frozenset()
    if isinstance(callback, CoreCallback):
        idle = callback.idle_hooks
    if not is_log_step:
        for_log_steps: frozenset[str] = getattr(callback, "log_step_hooks", frozenset())
        idle |= frozenset(name for name in for_log_steps if not (rehearses and _is_traced(name)))
    for name, declared in HOOKS.items():
        if name in idle:
            continue
        if getattr(type(callback), name, declared.default) is not declared.default or (
            not isinstance(callback, Callback) and callable(getattr(callback, name, None))
        ):
            yield name


def _is_traced(name: str) -> bool:
    return name in HOOKS and HOOKS[name].phase is Phase.STEP


def check_callback(callback: Any, where: str = "callbacks") -> None:
    """Check that an object can take part in a run.

    Args:
        callback: A `Callback`, or any object with hook methods.
        where: The argument that it was given as, for messages.

    Raises:
        HookError: If it is a class, a hook was set on a `Callback` instance, a hook's name or
            parameters do not fit, or an object of another kind has neither a hook nor a method that
            may be an event of the user's own.
    """
    kind = type(callback).__name__
    if isinstance(callback, type):
        raise HookError(
            f"{where} got the class {callback.__name__}. Pass an instance: {callback.__name__}()."
        )
    if isinstance(callback, Callback):
        late = HOOKS.keys() & vars(callback).keys()
        if late:
            raise HookError(f"{kind}: set {min(late)} on the class, not on the instance.")
        return
    for base in type(callback).__mro__[:-1]:
        check_listener(kind, vars(base))
    names = [name for name in dir(callback) if not name.startswith("_")]
    if not any(name in HOOKS or name.startswith("on_") for name in names):
        _check_own_events(callback, kind, where)


def _check_own_events(callback: Any, kind: str, where: str) -> None:
    """Check an object without a hook: its methods may be events of the user's own."""
    own = [] if where == "loggers" else _own_methods(callback)
    likely = [f"on_{name}" for name in own]
    meant = [name if name in HOOKS else near_miss(name) for name in likely]
    if own and None not in meant:
        raise HookError(f"{kind}.{own[0]} is not a hook. Did you mean {meant[0]!r}?")
    if not own:
        advice = (
            "Pass instances of loggers, such as modelzoo_trainer.loggers.TensorBoardLogger()."
            if where == "loggers"
            else "Derive it from modelzoo_trainer.Callback, or give it a method such as "
            "on_train_batch_end."
        )
        raise HookError(f"{where} got {callback!r} of type {kind}, which has no hook. {advice}")


_METHODS: Final = (FunctionType, staticmethod, classmethod)


def _own_methods(callback: Any) -> list[str]:
    """Return what may be events of the user's own: public methods of classes that are no library's.

    What is built in or torch's, such as an optimizer, was not meant as a callback.
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
