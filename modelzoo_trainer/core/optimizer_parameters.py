"""Whether an optimizer has the parameters that are to be trained."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from torch import Tensor
from torch.optim import Optimizer

from modelzoo_trainer.core.attribute_states import parameters_beside, values_of
from modelzoo_trainer.core.precision import parameters_of
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.optimizer")

_MOST: Final = 4  # names in a message


def check_parameters(trainer: Trainer) -> None:
    """Refuse an optimizer that would train nothing of the run.

    Args:
        trainer: Its model's parameters are those that are trained: sharded, on the device.

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
