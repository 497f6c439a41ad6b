"""The optimizers, and checks of their parameters."""

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
from modelzoo_trainer.core.attribute_states import optimizers_of, parameters_beside
from modelzoo_trainer.core.parts.manual_steps import ManualSteps, check_manual
from modelzoo_trainer.core.parts.optimizer_state import OptimizerState
from modelzoo_trainer.core.parts.structure import ModelStructure
from modelzoo_trainer.core.precision import parameters_of
from modelzoo_trainer.errors import OF_ANOTHER_RUN, ONLY_MODEL, CheckpointMismatch, ConfigError
from modelzoo_trainer.hooks.interceptors import Interceptable, event

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.optimizer")

_MOST: Final = 4  # names in a message


def check_parameters(trainer: Trainer) -> None:
    """Check that each optimizer has parameters of the prepared model.

    Raises:
        ConfigError: If none of an optimizer's parameters belongs to the model or to a module that
            is an attribute of the trainer.
    """
    for label, optimizer in _labelled(trainer):
        params = parameters_of(optimizer)
        own = set(map(id, params))
        if not own or not own.isdisjoint(map(id, trainer.model.parameters())):  # up to the first
            continue
        known = [*trainer.model.parameters(), *parameters_beside(trainer)[0]]
        if not own.isdisjoint(map(id, known)):
            continue
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{label}: none of its {len(params)} parameters belongs to the model of the trainer "
            f"({len(known)} parameters), so nothing would be trained. Pass optimizer=lambda "
            f"model: {kind}(model.parameters(), ...)."
        )


def check_trainable(trainer: Trainer) -> None:
    """Check that the optimizer has trainable parameters if the model does.

    Raises:
        ConfigError: If all its parameters are frozen, and there is no other optimizer.
    """
    params = _all_parameters(trainer)
    if not params or any(param.requires_grad for param in params):
        return
    left = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    others = (*parameters_beside(trainer)[1], *_parameters_of_callbacks(trainer))
    if left and not others:  # the backward pass reports a frozen model
        raise ConfigError(
            f"optimizer: none of its {len(params)} parameters requires a gradient, so nothing "
            f"would be trained. {len(left)} other parameters of the model do ({_some(left)}): "
            f"pass these, or set requires_grad to True."
        )


def warn_of_parameters(trainer: Trainer, known: frozenset[str]) -> frozenset[str]:
    """Warn about optimizer parameters outside the model, and untrained model parameters.

    `known`: what earlier calls returned: the problems that they have warned of.
    """
    own = set(map(id, _all_parameters(trainer)))
    named = dict(trainer.model.named_parameters())
    foreign = own.difference(map(id, named.values()))
    trainable = [name for name, param in named.items() if param.requires_grad]
    missing = [name for name in trainable if id(named[name]) not in own]
    if foreign or missing:
        of_modules, of_optimizers = parameters_beside(trainer)
        foreign.difference_update(map(id, of_modules))
        others = set(map(id, (*of_optimizers, *_parameters_of_callbacks(trainer))))
        missing = [name for name in missing if id(named[name]) not in others]
    outside = f"{len(foreign)} outside" if foreign else ""
    if outside and outside not in known:
        log.warning(
            "optimizer: %d of its %d parameters do not belong to the model, so checkpoints do not "
            "contain them. Make their module a part of the model, or an attribute of the trainer.",
            len(foreign),
            len(own),
        )
    if set(missing) - known:
        log.warning(
            "optimizer: %d of the model's %d trainable parameters are in no optimizer, so they "
            "are not trained: %s. Pass them to the optimizer, or set requires_grad to False.",
            len(missing),
            len(trainable),
            _some(missing),
        )
    return known | {outside, *missing}


def _labelled(trainer: Trainer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers with their names in messages."""
    for name, optimizer in trainer.optimizers.items():
        yield _label(name, is_alone=trainer.manual_steps is None), optimizer


def _label(name: str, *, is_alone: bool) -> str:
    return "optimizer" if is_alone else f"optimizers[{name!r}]"


def _all_parameters(trainer: Trainer) -> list[Tensor]:
    return [param for one in trainer.optimizers.values() for param in parameters_of(one)]


def _parameters_of_callbacks(trainer: Trainer) -> list[Tensor]:
    """Return the parameters of optimizers that are attributes of callbacks."""
    return [param for one in optimizers_of(trainer.all_callbacks) for param in parameters_of(one)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")


OptimizerFactory = Callable[[Module], Optimizer]
Given = Optimizer | OptimizerFactory
SeveralGiven = Mapping[str, Given] | Callable[[Module], Mapping[str, Optimizer]]

ALONE: Final = "optimizer"
"""The name of a single optimizer in `trainer.optimizers`."""
_KEY: Final = "optimizer"  # of the state
_KEY_OF_SEVERAL: Final = "optimizers"


class OptimizerCallback(CoreCallback, Interceptable):
    """Own `trainer.optimizer`, or `trainer.optimizers` if there are several.

    Args:
        optimizer: An optimizer over the model's parameters; a callable `model -> optimizer`; a
            mapping of names to these, or a callable `model -> mapping`, for several; or None
            (validation only).
        model_is_built: Whether the model is a module; an optimizer cannot have the parameters of a
            module that a callable will build.

    A resumed run uses the settings of the checkpoint, and warns if others are given.

    State: `optimizer`, its state dict, with its class, the names of its parameters if all belong
        to the model, and its initial settings. Of several `optimizers`: such a state by name.

    Raises:
        ConfigError: If it is none of these or a class, or an optimizer is given with a callable
            model; at set-up, if its step requires a closure; at the start of a fit, if none of its
            parameters belongs to the model, or a setting does not work with several optimizers.
    """

    def __init__(self, optimizer: Given | SeveralGiven | None, *, model_is_built: bool) -> None:
        given = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
        if isinstance(optimizer, Mapping):
            _check_names(optimizer)
        for one in given:
            if isinstance(one, Optimizer):
                if not model_is_built:
                    raise ConfigError(
                        "optimizer is an instance, but model is a function that creates the "
                        "model, so the optimizer cannot have the parameters of that model. Pass "
                        "optimizer=lambda model: ..., or pass the model itself."
                    )
            elif one is not None or isinstance(optimizer, Mapping):
                _check_callable(one)
        self._optimizer = optimizer
        self._states: dict[str, OptimizerState] = {}
        self._compared: ModelStructure | None = None
        self._warned: frozenset[str] = frozenset()
        self.is_instance = any(isinstance(one, Optimizer) for one in given)
        """Whether an optimizer instance was given, which already has parameters."""

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; empty before set-up, and if the trainer only validates."""
        return {name: state.optimizer for name, state in self._states.items()}

    @property
    def factories(self) -> list[Any]:
        """What was given: factories or instances; empty if the trainer only validates."""
        given = self._optimizer
        return list(given.values()) if isinstance(given, Mapping) else [given] if given else []

    @event("create-optimizer")
    def create_optimizer(self, model: Module) -> Any:
        """Return the given optimizer, or the result of the callable; a mapping if several."""
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
                "fit requires an optimizer, but the trainer has none. Pass Trainer(optimizer=...), "
                "or set trainer.init.optimizer in the YAML file."
            )
        if trainer.manual_steps is not None:
            check_manual(trainer, loop)
        if trainer.backend.caps.holds_values:  # a dry run has no real parameters
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
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        """Warn of parameters that are not trained, or not saved, if the model has changed."""
        if not trainer.backend.caps.holds_values:
            return
        if self._compared is None or not self._compared.is_current():
            self._compared = ModelStructure(trainer.model)
            self._warned = warn_of_parameters(trainer, self._warned)

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._compare(trainer)  # callbacks may unfreeze layers during an epoch

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        check_trainable(trainer)  # callbacks may unfreeze layers in on_fit_start

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
            f"optimizer is called with the model (a {type(model).__name__}) as its only argument. "
            f"Example: optimizer=lambda model: torch.optim.AdamW(model.parameters(), ...)"
        )
        raise


def _check_names(optimizers: Mapping[str, Any]) -> None:
    """Check the names, and that there are at least two optimizers."""
    for name in optimizers:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise ConfigError(
                f"optimizer: invalid name {name!r}. Use letters, digits and _, such as 'generator'."
            )
    if len(optimizers) < 2:
        raise ConfigError(
            f"A dict of optimizers is for several optimizers, but this one has {len(optimizers)}. "
            f"Pass one optimizer without a dict. (Several need a custom training_step that steps "
            f"each of them by name.)"
        )


def _check_number(
    state_dict: StateDict, own: Mapping[str, OptimizerState], *, several: bool
) -> None:
    """Check that the checkpoint has the same optimizers as this run."""
    advice = f"Use the original ones. {OF_ANOTHER_RUN} {ONLY_MODEL}"
    if several and _KEY in state_dict:
        raise CheckpointMismatch(
            f"The checkpoint has one optimizer, this run has several ({', '.join(own)}). {advice}"
        )
    if _KEY_OF_SEVERAL not in state_dict:
        return
    before = state_dict[_KEY_OF_SEVERAL]
    if not several or before.keys() != own.keys():
        raise CheckpointMismatch(
            f"The checkpoint has the optimizers {', '.join(sorted(before))}, but this run has "
            f"{', '.join(sorted(own)) if several else 'one'}. {advice}"
        )


def _check_callable(given: Any) -> None:
    """Check that it is a callable that accepts a model; a class expects parameters."""
    is_partial = isinstance(given, partial) and not given.args
    made = given.func if is_partial else given
    if isinstance(made, type) and issubclass(made, Optimizer):
        name = made.__name__
        what = f"a partial of the class {name}" if is_partial else f"the class {name}"
        raise ConfigError(
            f"optimizer is {what}, which expects parameters, not a model. Pass "
            f"optimizer=lambda model: {name}(model.parameters(), lr=...)."
        )
    if not callable(given):
        raise ConfigError(
            f"optimizer got {given!r}. Pass a torch.optim.Optimizer, a callable "
            f"model -> optimizer, or None to validate only."
        )


def _check_step(optimizer: Optimizer) -> None:
    """Check that the optimizer steps without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} is not supported, because its step() requires "
            f"a closure. Use another optimizer, such as AdamW."
        )
