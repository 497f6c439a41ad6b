"""The optimizer, or several, and whether they have the parameters to be trained."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.core.attribute_states import parameters_beside, values_of
from modelzoo_trainer.core.manual_steps import ManualSteps, check_manual
from modelzoo_trainer.core.optimizer_state import OptimizerState
from modelzoo_trainer.core.precision import parameters_of
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
        ConfigError: If none of an optimizer's parameters is the model's, or that of a module that
            is an attribute of the trainer.
    """
    known = {id(param) for param in (*trainer.model.parameters(), *parameters_beside(trainer)[0])}
    for label, optimizer in _labelled(trainer):
        params = parameters_of(optimizer)
        if not params or not known.isdisjoint(map(id, params)):
            continue
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{label}: none of its {len(params)} parameters is one of the {len(known)} of the "
            f"trainer's model, so nothing would be trained. Pass optimizer=lambda model: "
            f"{kind}(model.parameters(), ...)."
        )


def check_trainable(trainer: Trainer) -> None:
    """Refuse an optimizer of frozen parameters where others of the model are trainable.

    Raises:
        ConfigError: If none of its parameters requires a gradient, and no other optimizer is found.
    """
    params = _all_parameters(trainer)
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
    own = {id(param) for param in _all_parameters(trainer)}
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


def _labelled(trainer: Trainer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers with what messages call them."""
    for name, optimizer in trainer.optimizers.items():
        yield _label(name, is_alone=trainer.manual_steps is None), optimizer


def _label(name: str, *, is_alone: bool) -> str:
    return "optimizer" if is_alone else f"optimizers[{name!r}]"


def _all_parameters(trainer: Trainer) -> list[Tensor]:
    return [param for one in trainer.optimizers.values() for param in parameters_of(one)]


def _parameters_of_callbacks(trainer: Trainer) -> list[Tensor]:
    """Return the parameters of optimizers that are attributes of callbacks."""
    values = (value for one in trainer.all_callbacks for value in values_of(one))
    return [
        param for value in values if isinstance(value, Optimizer) for param in parameters_of(value)
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")


OptimizerFactory = Callable[[Module], Optimizer]
Given = Optimizer | OptimizerFactory
SeveralGiven = Mapping[str, Given] | Callable[[Module], Mapping[str, Optimizer]]

ALONE: Final = "optimizer"
"""The name of the one optimizer among `trainer.optimizers`."""
_KEY: Final = "optimizer"  # of the state
_KEY_OF_SEVERAL: Final = "optimizers"


class OptimizerCallback(CoreCallback, Advised):
    """Owns `trainer.optimizer`, or the `trainer.optimizers` of a trainer that has several.

    Args:
        optimizer: An optimizer over the model's parameters; a callable `model -> optimizer`; a
            mapping of names to such, or a callable `model -> mapping`, for several; or None
            (validation only).
        model_is_built: Whether the trainer was given a module; an optimizer cannot know the
            parameters of a module that a callable has yet to make.

    A run that is resumed has the settings of the checkpoint; others are warned of.

    State: `optimizer`, its state dict, with its class, the names of its parameters if all of them
        are the model's, and the settings that it was made with. Of several `optimizers`: such a
        state by name.

    Raises:
        ConfigError: If it is none of these or a class, or an optimizer is given with a model to be
            made; at set-up, if its step needs a closure; at the start of a fit, if none of its
            parameters is the model's, or if there are several and something does not work with
            them.
    """

    def __init__(self, optimizer: Given | SeveralGiven | None, *, model_is_built: bool) -> None:
        given = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
        if isinstance(optimizer, Mapping):
            _check_names(optimizer)
        for one in given:
            if isinstance(one, Optimizer):
                if not model_is_built:
                    raise ConfigError(
                        "optimizer is an instance, but model is a callable, so the optimizer "
                        "cannot have its parameters. Pass optimizer=lambda model: ..., or the "
                        "model itself."
                    )
            elif one is not None or isinstance(optimizer, Mapping):
                _check_callable(one)
        self._optimizer = optimizer
        self._states: dict[str, OptimizerState] = {}
        self._is_compared = False
        self.is_instance = any(isinstance(one, Optimizer) for one in given)
        """Whether an optimizer was given, which has its parameters already."""

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; empty before set-up, and of a trainer that only validates."""
        return {name: state.optimizer for name, state in self._states.items()}

    @event("create-optimizer")
    def create_optimizer(self, model: Module) -> Any:
        """Return the optimizer of a model: the one that was given, or what the callable makes.

        Of several a mapping.
        """
        given = self._optimizer
        assert given is not None  # not called for a trainer that only validates
        if isinstance(given, Mapping):
            return {name: _made(one, model) for name, one in given.items()}
        return _made(given, model)

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._optimizer is None:
            return
        made = self.create_optimizer(trainer.model)
        is_alone = not isinstance(made, Mapping)
        if not is_alone:
            _check_names(made)
        states = {}
        for name, optimizer in {ALONE: made}.items() if is_alone else made.items():
            label = _label(name, is_alone=is_alone)
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"{label}: the callable returned {optimizer!r}. Return a torch.optim.Optimizer."
                )
            _check_step(optimizer)
            states[name] = state = OptimizerState(optimizer, label)
            state.optimizer = trainer.backend.prepare_optimizer(optimizer)
        self._states = states
        if is_alone:
            trainer.optimizer = states[ALONE].optimizer
        else:
            trainer.manual_steps = ManualSteps(self.optimizers)
            trainer.precision.defer_scale()

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
        if trainer.manual_steps is not None:
            check_manual(trainer, loop)
        if trainer.backend.caps.holds_values:  # a dry run has other parameters than the host's
            check_parameters(trainer)

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        if trainer.manual_steps is not None and trainer.backend.comm.world_size > 1:
            # Gradients are averaged optimizer by optimizer.
            stack.enter_context(trainer.backend.accumulating())

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

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states = {name: state.save(trainer) for name, state in self._states.items()}
        if trainer.manual_steps is not None:
            state_dict[_KEY_OF_SEVERAL] = states
        elif states:
            state_dict[_KEY] = states[ALONE]

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if not trainer.has_optimizer:
            return
        _check_number(state_dict, self._states, several=trainer.manual_steps is not None)
        if trainer.manual_steps is not None:
            for name, saved in state_dict.get(_KEY_OF_SEVERAL, {}).items():
                self._states[name].load(trainer, saved, trainer.manual_steps.schedulers[name])
        elif _KEY in state_dict:
            self._states[ALONE].load(trainer, state_dict[_KEY], trainer.schedulers)


def _made(given: Any, model: Module) -> Any:
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


def _check_names(optimizers: Mapping[str, Any]) -> None:
    """Refuse names that cannot be parts of metrics and checkpoints; and one optimizer alone."""
    for name in optimizers:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise ConfigError(
                f"optimizer has the name {name!r}. Use letters, digits and _, such as 'generator'."
            )
    if len(optimizers) < 2:
        raise ConfigError(
            f"optimizer is a mapping with {len(optimizers)} entries; a mapping is for several, "
            f"which a training_step of your own steps. Pass one optimizer without a mapping."
        )


def _check_number(
    state_dict: StateDict, own: Mapping[str, OptimizerState], *, several: bool
) -> None:
    """Refuse a checkpoint with several optimizers where there is one, and the other way round."""
    advice = "Load the model alone with LoadCheckpointStates, or use what it was made with."
    if several and _KEY in state_dict:
        raise CheckpointMismatch(
            f"the checkpoint has one optimizer, and this run several ({', '.join(own)}). {advice}"
        )
    if _KEY_OF_SEVERAL not in state_dict:
        return
    before = state_dict[_KEY_OF_SEVERAL]
    if not several or before.keys() != own.keys():
        raise CheckpointMismatch(
            f"the checkpoint's optimizers are {', '.join(sorted(before))}, and this run has "
            f"{', '.join(sorted(own)) if several else 'one'}. {advice}"
        )


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
