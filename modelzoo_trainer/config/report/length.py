"""How long a run is, and at which steps it validates, saves and logs: told without running it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.callbacks import LimitBatches, LoadCheckpointStates, StepBasedEvaluation
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.core import Checkpoint, Logging, TrainingLoop

_FEW = 5  # positions that are listed without a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The steps at which something happens: the multiples of a number, and the end.

    Args:
        every: The number; None = at the end alone.
        first: A step before those; None = there is none.
    """

    every: int | None
    first: int | None = None

    def count(self, end: int) -> int:
        """Return how many there are in a run that ends at step `end`."""
        regular = 1 if self.every is None else math.ceil(end / self.every)
        return regular + (self.first is not None)

    def at(self, number: int, end: int) -> int:
        """Return the step of the one with a number, from 0."""
        number -= self.first is not None
        if number < 0 and self.first is not None:
            return self.first
        return end if self.every is None else min((number + 1) * self.every, end)

    def describe(self, end: int | None) -> str:
        """Return their number and the steps, the middle ones of many left out.

        Args:
            end: The last step of the run; None = not known.
        """
        if end is None:
            regular = "at the end" if self.every is None else f"{_ordinal(self.every)}, and the end"
            return regular if self.first is None else f"at step {self.first}, {regular}"
        num = self.count(end)
        shown = range(num) if num <= _FEW else (0, 1, 2, num - 1)
        steps = [str(self.at(number, end)) for number in shown]
        if num > _FEW:
            steps.insert(3, "...")
        return f"{num}, at step{'s' * (num > 1)} {', '.join(steps)}"


def _ordinal(every: int) -> str:
    return "at every step" if every == 1 else f"every {every} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """A fit in numbers; `global_step` is 0 at its start, unless a checkpoint says otherwise.

    Args:
        loop: The settings of the loop.
        checkpoint: Those of checkpoints.
        logging: Those of logging.
        ckpt_path: The checkpoint that the file starts from; None = anew; Ellipsis = from the
            newest one of its folder, if there is one.
        is_at_step_0: Whether the run is known to begin there (or goes on with an earlier one).
        evaluates_every: Steps between the validations of `StepBasedEvaluation`; None = it is not
            there.
    """

    loop: TrainingLoop
    checkpoint: Checkpoint
    logging: Logging
    ckpt_path: Any
    is_at_step_0: bool
    evaluates_every: int | None = None

    @classmethod
    def of(cls, plan: TrainerPlan) -> RunLength:
        """Return that of a plan.

        Args:
            plan: One trainer; what it runs is a fit.
        """
        ckpt_path = plan.call.get("ckpt_path", ...)
        loop = _made(TrainingLoop, plan.init.get("loop"))
        limits = _given(plan, LimitBatches, "num_batches")
        if limits:
            steps = math.ceil(min(limits) / loop.grad_accum_steps)
            loop.steps_per_epoch = min(steps, loop.steps_per_epoch or steps)
        return cls(
            loop=loop,
            evaluates_every=min(_given(plan, StepBasedEvaluation, "every_n_steps"), default=None),
            checkpoint=_made(Checkpoint, plan.init.get("checkpoint")),
            logging=_made(Logging, plan.init.get("logging")),
            ckpt_path=ckpt_path,
            is_at_step_0=ckpt_path in (None, ...) or _drops_the_step(plan),
        )

    @property
    def end(self) -> int | None:
        """The last step; None if it depends on the data, or on a checkpoint's step."""
        if self.loop.num_epochs is not None:
            return None
        if self.loop.num_steps is not None:
            return self.loop.num_steps if self.is_at_step_0 else None
        return self.loop.max_steps

    @property
    def bound(self) -> int | None:
        """A step that the run does not go beyond; None = none is known."""
        loop = self.loop
        bounds = [] if self.end is None else [self.end]
        if loop.max_steps is not None and loop.num_steps is None:
            bounds.append(loop.max_steps)
        if loop.num_epochs is not None and loop.steps_per_epoch is not None and self.is_at_step_0:
            bounds.append(loop.num_epochs * loop.steps_per_epoch)
        return min(bounds, default=None)

    @property
    def counts_from_0(self) -> bool:
        """Whether the run has all steps up to its end, and not only those after a checkpoint's."""
        return self.end is not None and self.is_at_step_0

    @property
    def validations(self) -> Positions | None:
        """Where train stages end; None if no validation follows them, or it is not known where."""
        if self.evaluates_every is not None:
            return Positions(every=self.evaluates_every)
        frequency = self.loop.eval_frequency
        if not frequency:
            return None
        if not isinstance(frequency, float):
            return Positions(every=frequency)
        if frequency == 1.0:
            return Positions(every=None)
        if self.end is None:
            return None
        return Positions(every=max(1, math.ceil(frequency * self.end)))

    @property
    def checkpoints(self) -> Positions | None:
        """Where checkpoints are written; None if there are none but perhaps the initial one."""
        first = 0 if self.has_initial_checkpoint else None
        times = self.checkpoint.times
        return Positions(every=times.steps, first=first) if self.checkpoint.saves_at_end else None

    @property
    def has_initial_checkpoint(self) -> bool:
        """Whether one is written before the first step, in a run that begins anew."""
        return self.checkpoint.save_initial_checkpoint and self.ckpt_path in (None, ...)

    @property
    def log_lines(self) -> Positions:
        """Which steps are logged."""
        return Positions(every=self.logging.log_steps or None)


def _made(kind: Callable[..., Any], component: Component | None) -> Any:
    """Return the settings of a section, as its core callback, which only keeps them."""
    known = inspect.signature(kind).parameters
    given = {} if component is None else component.arguments
    return kind(**{name: value for name, value in given.items() if name in known})


def _given(plan: TrainerPlan, kind: type, name: str) -> list[int]:
    """Return an argument of the callbacks of a class."""
    callbacks = plan.init.get("callbacks", ())
    return [one.arguments[name] for one in callbacks if one.target is kind]


def _drops_the_step(plan: TrainerPlan) -> bool:
    """Return whether callbacks take no more of a checkpoint than begins at step 0."""
    filters = [
        component.make()
        for component in plan.init.get("callbacks", ())
        if component.target is LoadCheckpointStates
    ]
    return any("all" not in one.states and "global_step" not in one.states for one in filters)
