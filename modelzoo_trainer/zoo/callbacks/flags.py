"""Dotted flags for a whole run, its training or its validations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from modelzoo_trainer.base.devices import (
    BackendError,
    held_switches,
    hold_switches,
    is_switch,
    switch_names,
    switch_problem,
)
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.csx_flags import (
    MICRO_BATCH_SIZE,
    flag_problem,
    micro_batch_size,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class _Flags(Callback):
    """Check flags; subclasses determine when they apply."""

    def __init__(self, **flags: Any) -> None:
        for key, value in flags.items():
            if is_switch(key):
                wrong = None if value is None else switch_problem(key, value)
            else:
                wrong = flag_problem(key, value, switch_names())
            if wrong is not None:
                raise ConfigError(f"{type(self).__name__}.{key} {wrong}")
        self.flags = flags
        self.micro_batch_size = micro_batch_size(flags)
        self.switches = {
            key: value for key, value in flags.items() if is_switch(key) and value is not None
        }

    @property
    def notes(self) -> list[str]:
        """Flags without effect."""
        idle = [key for key in self.flags if key != MICRO_BATCH_SIZE and not is_switch(key)]
        found = [f"{', '.join(idle)}: no effect on this hardware."] if idle else []
        size = self.flags.get(MICRO_BATCH_SIZE)
        if size is not None and self.micro_batch_size is None:
            found.append(f"{MICRO_BATCH_SIZE} {size!r}: batches are not split. Give a number.")
        return found

    def _hold(self, stack: ExitStack) -> None:
        """Set the flags of torch until a stack is closed."""
        if not self.switches:
            return
        try:
            stack.enter_context(held_switches(self.switches))
        except BackendError as error:
            raise ConfigError(f"{type(self).__name__}.{error}") from None


class ScopedTrainFlags(_Flags):
    """Set flags for training; `csx.performance.micro_batch_size` splits its batches.

    The samples of a batch go through the model in micro-batches of this size, one after another;
    their gradients are accumulated.

    Names that begin with `torch.` are flags and setters of torch:
    `torch.backends.cudnn.benchmark`, `torch.backends.cuda.matmul.allow_tf32`,
    `torch.set_float32_matmul_precision`, ... They are set during a train stage and restored at its
    end, also after an exception. Flags of other hardware have no effect.

    Args:
        **flags: Values by dotted name; they override values of `GlobalFlags`. Null = not set.

    Raises:
        ConfigError: If a flag is unknown or its value is invalid; in training, if torch rejects it.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if MICRO_BATCH_SIZE in self.flags:
            trainer.split_train_batches(self.micro_batch_size)

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._hold(stack)


class ScopedValidateFlags(_Flags):
    """Set flags for validation; `csx.performance.micro_batch_size` splits its batches.

    Flags of torch are set during each validation, also between train stages.

    Args:
        **flags: Values by dotted name, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If a flag is unknown or its value is invalid; in validation, if torch rejects
            it.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        if MICRO_BATCH_SIZE in self.flags:
            trainer.val_micro_batch_size = self.micro_batch_size

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._hold(stack)


class GlobalFlags(_Flags):
    """Set flags for the whole run, training and validation; scoped flags override them.

    Flags of torch are set when the trainer is created, before its model, and restored when it is
    closed.

    Args:
        **flags: Values by dotted name, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If a flag is unknown or its value is invalid; at setup, if torch rejects it.
    """

    @override
    def pre_setup(self, trainer: Trainer) -> None:  # before the `setup` of the scoped ones
        if MICRO_BATCH_SIZE in self.flags:
            trainer.split_train_batches(self.micro_batch_size)
            trainer.val_micro_batch_size = self.micro_batch_size
        try:
            hold_switches(trainer.backend, self.switches)
        except BackendError as error:
            raise ConfigError(f"GlobalFlags.{error}") from None


class _HarnessFlags(_Flags):
    """Flags for the validations of one harness, by the name of its loop's hook."""

    loop_name: ClassVar[str]

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if loop.hook != self.loop_name:
            return
        if MICRO_BATCH_SIZE in self.flags:
            stack.callback(setattr, trainer, "val_micro_batch_size", trainer.val_micro_batch_size)
            trainer.val_micro_batch_size = self.micro_batch_size
        self._hold(stack)


class ScopedEleutherEvalHarnessFlags(_HarnessFlags):
    """Set flags for the validations of the Eleuther evaluation harness only.

    They apply to validations whose loop has the hook `eleuther_eval_harness`, and are restored
    after each.

    Args:
        **flags: Values by dotted name, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If a flag is unknown or its value is invalid; in validation, if torch rejects
            it.
    """

    loop_name = "eleuther_eval_harness"


class ScopedBigCodeEvalHarnessFlags(_HarnessFlags):
    """Set flags for the validations of the BigCode evaluation harness only.

    They apply to validations whose loop has the hook `bigcode_eval_harness`, and are restored
    after each.

    Args:
        **flags: Values by dotted name, as in `ScopedTrainFlags`.

    Raises:
        ConfigError: If a flag is unknown or its value is invalid; in validation, if torch rejects
            it.
    """

    loop_name = "bigcode_eval_harness"
