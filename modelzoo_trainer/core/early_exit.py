"""Graceful stops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader
from modelzoo_trainer.errors import StopTraining

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Comm
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.early_exit")

SAVE: Final = "save"
"""The topic that the main process proposes when a timed checkpoint is due."""
_STOP: Final = "stop "
_INTERRUPT: Final = "interrupt "
_RUNS: Final = count(1)  # unique among trainers: proposals may arrive late


class ExitHandle:
    """Removes a registered condition."""

    def __init__(self, conditions: list[Callable[[], bool]], condition: Callable[[], bool]) -> None:
        self._conditions = conditions
        self._condition = condition

    def remove(self) -> None:
        """Remove the condition. Idempotent."""
        if self._condition in self._conditions:
            self._conditions.remove(self._condition)


class EarlyExit(CoreCallback):
    """Stop a run gracefully at a step boundary.

    End hooks are called and the final checkpoint is written. Stop requests apply to the current
    run only; registered conditions stay. After an interruption (a signal, a stop file, the time
    limit), `trainer.interrupted` names its cause, and `on_interrupt` is called. `is_asked`: whether
    there is anything to check.

    All processes stop at the same step boundary or validation batch, whichever of them got the
    request: a few steps later, since processes do not wait for one another.
    """

    def __init__(self) -> None:
        self.should_exit = False
        self.is_asked = False
        self.reason = ""
        self._asked = ""
        self._interruption: str | None = None
        self._conditions: list[Callable[[], bool]] = []
        self._depth = 0
        self._run = 0
        self._shared: Comm | None = None
        self._proposed: set[str] = set()

    def register(self, condition: Callable[..., bool], *args: Any, **kwargs: Any) -> ExitHandle:
        """Register a condition that is checked at each step boundary.

        Args:
            condition: Returns whether the run should end; called with `args` and `kwargs`.
            args: Positional arguments of `condition`.
            kwargs: Keyword arguments of `condition`.

        Returns:
            A handle with `remove()`.

        Raises:
            TypeError: If it is not callable.
        """
        if not callable(condition):
            raise TypeError(f"early_exit.register got {condition!r}, which is not callable.")

        def ask() -> bool:
            return condition(*args, **kwargs)

        self._conditions.append(ask)
        self.is_asked = True
        return ExitHandle(self._conditions, ask)

    def stop(self, reason: str) -> None:
        """Request a graceful stop at the next step boundary.

        Args:
            reason: Why, for the log.
        """
        if self._depth == 0:
            log.warning(
                "early_exit.stop(%r) has no effect: no fit or validation is running", reason
            )
        if self._shared is not None:
            self._propose(self._shared, f"{_STOP}{self._run}:{reason}")
        else:
            self.stop_all(reason)

    def stop_all(self, reason: str) -> None:
        """Request a stop on all processes at the same step, before the next one.

        Args:
            reason: Why, for the log; the same on all processes.
        """
        self._asked = self._asked or reason
        self.is_asked = True

    def interrupt(self, name: str) -> None:
        """Request a stop because of an interruption. Safe in a signal handler.

        Args:
            name: The cause: a signal name such as "SIGINT", "stop file", "max_time".
        """
        if self._shared is not None:
            run = "" if name.startswith("SIG") else self._run  # a signal applies to any run
            self._propose(self._shared, f"{_INTERRUPT}{run}:{name}")
            return
        self._interruption = self._interruption or name
        self.stop_all(name)

    def _propose(self, comm: Comm, topic: str) -> None:
        if topic not in self._proposed:
            self._proposed.add(topic)
            comm.propose(topic)

    def request_stop(self, stop: StopTraining) -> None:
        """Request a stop for a `StopTraining` raised by a callback."""
        self.stop(str(stop) or "StopTraining was raised")

    def end(self, stop: StopTraining) -> None:
        """Stop the run here for a `StopTraining` raised outside of callbacks.

        Raises:
            RuntimeError: If other processes continue.
        """
        reason = str(stop) or "StopTraining was raised"
        if self._shared is not None and not self._shared.try_barrier("stop"):
            raise RuntimeError(
                f"StopTraining ({reason}) was raised, but not by all processes, and the others "
                f"cannot continue without this one. Raise it on all processes at the same place, "
                f"or call trainer.early_exit.stop(reason)."
            ) from stop
        self._asked = self._asked or reason
        self.is_asked = self.should_exit = True
        self.reason = self._asked
        log.info("Stopping the run: %s.", self.reason)

    def stop_if_requested(self, trainer: Trainer) -> None:
        """Stop the run here if requested; does not check conditions."""
        if self._asked or self._shared is not None:
            self.check(trainer)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        trainer.interrupted = self._interruption = None
        self._enter(trainer, stack)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._enter(trainer, stack)

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._enter(trainer, stack)

    @override
    def on_train_ready(self, trainer: Trainer) -> None:
        self.stop_if_requested(trainer)

    def _enter(self, trainer: Trainer, stack: ExitStack) -> None:
        if self._depth == 0:
            self._run = next(_RUNS)
            self._proposed.clear()
            self._shared = trainer.backend.comm if trainer.backend.comm.world_size > 1 else None
            self._interruption = None
            self.should_exit = False
            self.reason = self._asked = ""
            self.is_asked = bool(self._conditions) or self._shared is not None
        self._depth += 1
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._shared = None

    def check(self, trainer: Trainer) -> bool:
        """Check all conditions, at a step boundary; return whether to stop."""
        if not self._asked:
            for condition in self._conditions:
                if condition():
                    self.stop("a registered condition holds")
                    break
        if self._shared is not None:
            for topic in self._shared.decided():
                self._hear(trainer, topic)
        if self._asked and not self.should_exit:
            self.should_exit = True
            self.reason = self._asked
            log.info("Stopping the run at step %d: %s.", trainer.global_step, self.reason)
        if self._interruption is not None and trainer.interrupted is None:
            trainer.interrupted = self._interruption
            trainer.hooks.on_interrupt(trainer, self._interruption)
        return self.should_exit

    def _hear(self, trainer: Trainer, topic: str) -> None:
        """Apply a topic that all processes have agreed on at this step."""
        if topic == SAVE:
            trainer.checkpoint.ask()
            return
        is_interruption = topic.startswith(_INTERRUPT)
        told = topic.removeprefix(_INTERRUPT if is_interruption else _STOP)
        run, _, reason = told.partition(":")
        if run not in ("", str(self._run)):  # of an earlier run
            return
        if is_interruption:
            self._interruption = self._interruption or reason
        self._asked = self._asked or reason
