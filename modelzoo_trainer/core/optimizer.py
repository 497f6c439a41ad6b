"""The optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

OptimizerFactory = Callable[[Module], Optimizer]

_KIND: Final = "kind"  # beside what torch's optimizers have in their state


class OptimizerCallback(CoreCallback):
    """Owns `trainer.optimizer`.

    Args:
        optimizer: An optimizer over the model's parameters, a callable `model -> optimizer`, or
            None (validation only).
        model_is_built: Whether the trainer was given a module; an optimizer cannot know the
            parameters of a module that a callable has yet to make.

    State: `optimizer`, its state dict.

    Raises:
        ConfigError: If it is none of these, or an optimizer is given with a model to be made.
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
        elif optimizer is not None and not callable(optimizer):
            raise ConfigError(
                f"optimizer got {optimizer!r}. Pass a torch.optim.Optimizer, a callable "
                f"model -> optimizer, or None to validate only."
            )
        self._optimizer = optimizer

    @override
    def setup(self, trainer: Trainer) -> None:
        optimizer = self._optimizer
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = optimizer(trainer.model)
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"optimizer: the callable returned {optimizer!r}. Return a "
                    f"torch.optim.Optimizer."
                )
        if optimizer is not None:
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

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if trainer.has_optimizer:
            state = trainer.backend.state_view(trainer.optimizer.state_dict())
            state_dict["optimizer"] = state | {_KIND: type(trainer.optimizer).__name__}

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
        try:
            trainer.optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer does not fit {type(trainer.optimizer).__name__}: "
                f"{error}. Load the model alone with LoadCheckpointStates, or use the optimizer "
                f"and parameter groups that it was made with."
            ) from None
