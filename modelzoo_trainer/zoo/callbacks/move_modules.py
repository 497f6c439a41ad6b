"""Modules besides the model on the device, and synchronized batch normalization."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import Names, checked_dataclass
from modelzoo_trainer.callback import Callback, CoreCallback, Loader
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.callbacks.sync_batch_norm import share_batch_norms

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Backend
    from modelzoo_trainer.trainer import Trainer


ModuleNames = Annotated[Names, "a list of names such as 'teacher'"]


@checked_dataclass
class MoveModulesToDevice(Callback):
    """Move modules besides the model to the device when a fit or a validation begins.

    For example a teacher, a metric or a loss function with weights. They are only moved: not
    trained, saved or synchronized between processes. On a device that holds no values (a dry run)
    they are restored afterwards.

    Args:
        modules: Paths from the trainer, such as `teacher` or `callbacks.Distill.teacher`; None =
            every module that is an attribute of the trainer, or of an add-on callback, and not part
            of the model.

    Raises:
        ConfigError: If no name is given; on moving, if a path does not exist or is not a module.
    """

    modules: ModuleNames | None = None

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._move(trainer, stack)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._move(trainer, stack)

    def _move(self, trainer: Trainer, stack: ExitStack) -> None:
        found = _all_of(trainer) if self.modules is None else self._named(trainer)
        for module in found:
            if not trainer.backend.caps.holds_values:
                _keep(module, stack)
            trainer.backend.to_device(module)

    def _named(self, trainer: Trainer) -> Iterator[Module]:
        for name in self.modules or ():
            value = _at(trainer, name)
            if not isinstance(value, Module):
                raise ConfigError(
                    f"MoveModulesToDevice.modules: trainer.{name} is a {type(value).__name__}, not "
                    f"a torch.nn.Module."
                )
            yield value


def _keep(module: Module, stack: ExitStack) -> None:
    """Restore, when the stack is closed, what a device without values would lose."""
    for part in module.modules():
        for name, param in part._parameters.items():
            stack.callback(part._parameters.__setitem__, name, param)
        for name, buffer in part._buffers.items():
            stack.callback(part._buffers.__setitem__, name, buffer)
    for tensor in (*module.parameters(), *module.buffers()):
        stack.callback(setattr, tensor, "data", tensor.data)


def _at(trainer: Trainer, name: str) -> Any:
    first, _, rest = name.partition(".")
    if first == "callbacks" and rest:
        key, _, path = rest.partition(".")
        if key not in trainer.callbacks:
            raise ConfigError(
                f"MoveModulesToDevice.modules: {name!r} names a callback that does not exist. "
                f"{suggest(key, trainer.callbacks)}"
            )
        owner, name_of = trainer.callbacks[key], path
    else:
        owner, name_of = trainer, name
    try:
        return attrgetter(name_of)(owner) if name_of else owner
    except AttributeError as error:
        raise ConfigError(f"MoveModulesToDevice.modules: {name!r}: {error}") from None


def _all_of(trainer: Trainer) -> Iterator[Module]:
    parts = {id(part) for part in trainer.model.modules()}
    parts.add(id(trainer.compiled_model))
    parts.update(id(part) for part in trainer.compiled_model.modules())
    users = [one for one in trainer.all_callbacks if not isinstance(one, CoreCallback)]
    for owner in [trainer, *users]:
        for value in list(getattr(owner, "__dict__", {}).values()):
            if isinstance(value, Module) and id(value) not in parts:
                parts.add(id(value))
                yield value


log = logging.getLogger("modelzoo_trainer.model")


class ConvertSyncBatchNorm(Callback):
    """Synchronize batch normalization over all processes (SyncBatchNorm), if there are several.

    `BatchNorm1d`, `2d` and `3d` layers are replaced when the model is created; names and values
    stay the same, so checkpoints fit with and without. With one process, the model is unchanged.
    A process whose data has ended early still contributes its padding batch.

    Cost: In training, two small all-reduces per layer in the forward pass and two in the backward
        pass.
    """

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if trainer.backend.comm.data_shard[1] == 1:
            return
        own: ModelCallback = trainer.callbacks["model"]
        own.change(partial(_converted, trainer.backend))


def _converted(backend: Backend, model: Module) -> Module:
    model, num = share_batch_norms(model, backend.comm.reduce)
    log.info(
        "Batch normalization is synchronized over processes (%d); converted layers: %d.",
        backend.comm.data_shard[1],
        num,
    )
    return model
