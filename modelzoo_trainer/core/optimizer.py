"""The optimizer, and whether it has the parameters to be trained."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.restoring import check_optimizer, check_steps, group_kinds
from modelzoo_trainer.core.attribute_states import parameters_beside, values_of
from modelzoo_trainer.core.optimizer_facts import (
    Names,
    Settings,
    changes,
    check_names,
    check_shapes,
    names_of,
    settings_of,
)
from modelzoo_trainer.core.precision import parameters_of
from modelzoo_trainer.core.schedulers import scheduled_keys
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.interceptors import Advised, event

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.optimizer")

_MOST: Final = 4  # names in a message


def check_parameters(trainer: Trainer) -> None:
    """Refuse an optimizer that would train nothing of the run.

    Parameters of the trainer's model are those that are trained: sharded, on the device.

    Raises:
        ConfigError: If none of the optimizer's parameters is the model's, or that of a module that
            is an attribute of the trainer.
    """
    params = parameters_of(trainer.optimizer)
    known = {id(param) for param in (*trainer.model.parameters(), *parameters_beside(trainer)[0])}
    if params and known.isdisjoint(map(id, params)):
        kind = type(trainer.optimizer).__name__
        raise ConfigError(
            f"optimizer: none of its {len(params)} parameters is one of the {len(known)} of the "
            f"trainer's model, so nothing would be trained. Pass optimizer=lambda model: "
            f"{kind}(model.parameters(), ...)."
        )


def check_trainable(trainer: Trainer) -> None:
    """Refuse an optimizer of frozen parameters where others of the model are trainable.

    Raises:
        ConfigError: If none of its parameters requires a gradient, and no other optimizer is found.
    """
    params = parameters_of(trainer.optimizer)
    if not params or any(param.requires_grad for param in params):
        return
    left = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    others = (*parameters_beside(trainer)[1], *_parameters_of_callbacks(trainer))
    if left and not others:  # with none left the backward pass reports a frozen model
        raise ConfigError(
            f"optimizer: none of its {len(params)} parameters requires a gradient, so nothing "
            f"would be trained; {len(left)} others of the model do: {_some(left)}. Give it these, "
            f"or set requires_grad to True."
        )


def warn_of_parameters(trainer: Trainer) -> None:
    """Warn of parameters that are the optimizer's alone, or trainable and the model's alone."""
    own = {id(param) for param in parameters_of(trainer.optimizer)}
    of_modules, of_optimizers = parameters_beside(trainer)
    known = {id(param) for param in (*trainer.model.parameters(), *of_modules)}
    if own - known:
        log.warning(
            "optimizer: %d of its %d parameters are not the model's. Checkpoints do not have them; "
            "make their module a part of the model, or an attribute of the trainer.",
            len(own - known),
            len(own),
        )
    others = (*of_optimizers, *_parameters_of_callbacks(trainer))
    trained = own | {id(param) for param in others}
    named = {name: param for name, param in trainer.model.named_parameters() if param.requires_grad}
    missing = [name for name, param in named.items() if id(param) not in trained]
    if missing:
        log.warning(
            "optimizer: %d of the model's %d trainable parameters are in no optimizer and stay as "
            "they are: %s. Give them to it, or set requires_grad to False.",
            len(missing),
            len(named),
            _some(missing),
        )


def _parameters_of_callbacks(trainer: Trainer) -> list[Tensor]:
    """Return the parameters of optimizers that are attributes of callbacks."""
    values = (value for one in trainer.all_callbacks for value in values_of(one))
    return [
        param for value in values if isinstance(value, Optimizer) for param in parameters_of(value)
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")


log = logging.getLogger("modelzoo_trainer.optimizer")

OptimizerFactory = Callable[[Module], Optimizer]

_KIND: Final = "kind"  # beside what torch's optimizers have in their state
_NAMES: Final = "names"
_SETTINGS: Final = "settings"


class OptimizerCallback(CoreCallback, Advised):
    """Owns `trainer.optimizer`.

    Args:
        optimizer: An optimizer over the model's parameters, a callable `model -> optimizer`, or
            None (validation only).
        model_is_built: Whether the trainer was given a module; an optimizer cannot know the
            parameters of a module that a callable has yet to make.

    A run that is resumed has the settings of the checkpoint; others are warned of.

    State: `optimizer`, its state dict, with its class, the names of its parameters if all of them
        are the model's, and the settings that it was made with.

    Raises:
        ConfigError: If it is none of these or a class, or an optimizer is given with a model to be
            made; at set-up, if its step needs a closure; at the start of a fit, if none of its
            parameters is the model's.
    """

    def __init__(
        self, optimizer: Optimizer | OptimizerFactory | None, *, model_is_built: bool
    ) -> None:
        if isinstance(optimizer, Optimizer):
            if not model_is_built:
                raise ConfigError(
                    "optimizer is an instance, but model is a callable, so the optimizer cannot "
                    "have its parameters. Pass optimizer=lambda model: ..., or the model itself."
                )
        elif optimizer is not None:
            _check_callable(optimizer)
        self._optimizer = optimizer
        self._given: Settings = []
        self._held: Settings | None = None
        self._reported = ""
        self._named: tuple[list[int], Names | None] | None = None
        self._is_compared = False

    @property
    def is_instance(self) -> bool:
        """Whether an optimizer was given, which has its parameters already."""
        return isinstance(self._optimizer, Optimizer)

    @event("create-optimizer")
    def create_optimizer(self, model: Module) -> Optimizer:
        """Return the optimizer of a model: the one that was given, or what the callable makes."""
        given = self._optimizer
        assert given is not None  # not called for a trainer that only validates
        if isinstance(given, Optimizer):
            return given
        try:
            return given(model)
        except TypeError as error:
            error.add_note(
                f"optimizer was called with the model, a {type(model).__name__}: lambda model: "
                f"torch.optim.AdamW(model.parameters(), ...)"
            )
            raise

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._optimizer is None:
            return
        optimizer = self.create_optimizer(trainer.model)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer: the callable returned {optimizer!r}. Return a torch.optim.Optimizer."
            )
        _check_step(optimizer)
        self._given = self._held = settings_of(optimizer)
        trainer.optimizer = trainer.backend.prepare_optimizer(optimizer)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        if not trainer.has_optimizer:
            raise ConfigError(
                "fit needs an optimizer, and the trainer has none. Pass Trainer(optimizer=...), "
                "or trainer.init.optimizer in the YAML file."
            )
        if trainer.backend.caps.holds_values:  # a dry run has other parameters than the host's
            check_parameters(trainer)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        if not self._is_compared and trainer.backend.caps.holds_values:
            self._is_compared = True
            warn_of_parameters(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        check_trainable(trainer)  # after callbacks that unfreeze something when a fit starts

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if trainer.has_optimizer:
            state = trainer.backend.state_view(trainer.optimizer.state_dict())
            state |= {_KIND: type(trainer.optimizer).__name__}
            names = self._names(trainer)
            if names is not None:
                state[_NAMES] = names
            if self._held is not None:
                state[_SETTINGS] = self._held
            state_dict["optimizer"] = state

    def _names(self, trainer: Trainer) -> Names | None:
        """Return the names of the parameters; groups may have been added since the last time."""
        sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
        if self._named is None or self._named[0] != sizes:
            self._named = sizes, names_of(trainer.model, trainer.optimizer)
        return self._named[1]

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if not trainer.has_optimizer or "optimizer" not in state_dict:
            return
        state = dict(state_dict["optimizer"])
        own = type(trainer.optimizer).__name__
        kind = state.pop(_KIND, own)  # the first format does not say
        if kind != own:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer is {kind}, and this run has {own}, whose state is "
                f"another. Load the model alone with LoadCheckpointStates, or use {kind}."
            )
        names, before = self._names(trainer), state.pop(_NAMES, None)
        if names and before and state["state"]:
            check_names(names, before)
        settings = state.pop(_SETTINGS, None)
        check_shapes(trainer.optimizer, state, names)
        check_steps(state)
        before_load = group_kinds(trainer.optimizer)
        try:
            trainer.optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer does not fit {own}: {error}. Load the model alone "
                f"with LoadCheckpointStates, or use the optimizer and parameter groups that it "
                f"was made with."
            ) from None
        check_optimizer(trainer.optimizer, before_load)
        self._held = settings
        if settings is not None:
            self._tell(changes(self._given, settings, scheduled_keys(trainer.schedulers)))

    def _tell(self, changed: str) -> None:
        """Warn of settings that are not those of the checkpoint, once."""
        if changed and changed != self._reported:
            log.warning(
                "optimizer: %s. Using the checkpoint's settings, so that the run continues as "
                "before. For the new ones set optimizer.param_groups in a callback's on_fit_start, "
                "or load the model alone with LoadCheckpointStates.",
                changed,
            )
        self._reported = changed


def _check_callable(given: Any) -> None:
    """Refuse what makes no optimizer of a model: a class takes parameters, not a model."""
    is_partial = isinstance(given, partial) and not given.args
    made = given.func if is_partial else given
    if isinstance(made, type) and issubclass(made, Optimizer):
        name = made.__name__
        what = f"a partial of the class {name}" if is_partial else f"the class {name}"
        raise ConfigError(
            f"optimizer is {what}, which takes parameters and not a model. Pass "
            f"optimizer=lambda model: {name}(model.parameters(), lr=...)."
        )
    if not callable(given):
        raise ConfigError(
            f"optimizer got {given!r}. Pass a torch.optim.Optimizer, a callable "
            f"model -> optimizer, or None to validate only."
        )


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has to compute the loss several times in a step."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer: the step of {type(optimizer).__name__} needs a closure that computes the "
            f"loss anew, and optimizers are stepped without one. Use another, such as AdamW."
        )
