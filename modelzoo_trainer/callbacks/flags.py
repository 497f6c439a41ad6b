"""Dotted flags of the format: for a whole run, its training, its validations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.flags import MICRO_BATCH_SIZE, flag_problem, micro_batch_size

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class _Flags(Callback):
    """Checks its flags; a subclass says where the size of micro-batches goes."""

    def __init__(self, **flags: Any) -> None:
        for key, value in flags.items():
            wrong = flag_problem(key, value)
            if wrong is not None:
                raise ConfigError(f"{type(self).__name__}.{key} {wrong}")
        self.flags = flags
        self.micro_batch_size = micro_batch_size(flags)

    @property
    def notes(self) -> list[str]:
        """What has no effect here."""
        idle = [key for key in self.flags if key != MICRO_BATCH_SIZE]
        found = [f"{', '.join(idle)}: no effect on this hardware."] if idle else []
        size = self.flags.get(MICRO_BATCH_SIZE)
        if size is not None and self.micro_batch_size is None:
            found.append(f"{MICRO_BATCH_SIZE} {size!r}: batches stay whole. Write a number.")
        return found


class ScopedTrainFlags(_Flags):
    """Flags for training; `csx.performance.micro_batch_size` splits its batches.

    The samples of a batch go through the model in micro-batches of this size, one after another,
    and their gradients add up to that of the batch. Flags of other hardware have no effect.

    Args:
        **flags: By their dotted names; they go before those of `GlobalFlags`.

    Raises:
        ConfigError: If there is no such flag, or its value does not fit.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if MICRO_BATCH_SIZE in self.flags:
            trainer.split_train_batches(self.micro_batch_size)


class ScopedValidateFlags(_Flags):
    """Flags for validation; `csx.performance.micro_batch_size` splits its batches.

    Args:
        **flags: By their dotted names, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If there is no such flag, or its value does not fit.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if MICRO_BATCH_SIZE in self.flags:
            trainer.val_micro_batch_size = self.micro_batch_size


class GlobalFlags(_Flags):
    """Flags for the whole run, training and validation, where no scoped ones say otherwise.

    Args:
        **flags: By their dotted names, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If there is no such flag, or its value does not fit.
    """

    @override
    def pre_setup(self, trainer: Trainer) -> None:  # before the `setup` of the scoped ones
        if MICRO_BATCH_SIZE in self.flags:
            trainer.split_train_batches(self.micro_batch_size)
            trainer.val_micro_batch_size = self.micro_batch_size
