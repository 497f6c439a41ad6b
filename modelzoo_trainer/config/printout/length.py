"""Print the length of a run and the steps at which it validates, saves and logs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.callbacks import (
    KeepNCheckpoints,
    LimitBatches,
    LoadCheckpointStates,
    StepBasedEvaluation,
)
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.plan import METHODS, TrainerPlan
from modelzoo_trainer.config.printout.components import row, show
from modelzoo_trainer.config.printout.hooks import listens, micro_batch_sizes
from modelzoo_trainer.core import Checkpoint, Logging, TrainingLoop
from modelzoo_trainer.core.loop import EPOCH
from modelzoo_trainer.core.parts.watched_metrics import (
    are_shipped,
    hints_for,
    is_for_several_fits,
    num_validations,
)

_ROWS = {"test": "test", "predict": "predictions"}
_FEW = 5  # positions that are listed without a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSteps:
    """The steps of an event: the multiples of a number, and the end."""

    every: int | None  # the number; None = at the end alone
    first: int | None = None  # a step before those; None = none

    def count(self, end: int) -> int:
        """Return their number in a run that ends at step `end`."""
        regular = 1 if self.every is None else math.ceil(end / self.every)
        return regular + (self.first is not None)

    def at(self, number: int, end: int) -> int:
        """Return the step of the event with an index, from 0."""
        number -= self.first is not None
        if number < 0 and self.first is not None:
            return self.first
        return end if self.every is None else min((number + 1) * self.every, end)

    def describe(self, end: int | None) -> str:
        """Return their number and steps; of many, those in the middle are omitted.

        `end`: the last step of the run; None = unknown.
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
    """A fit in numbers; `global_step` is 0 at its start, unless a checkpoint says otherwise."""

    loop: TrainingLoop
    checkpoint: Checkpoint
    logging: Logging
    # the checkpoint that the run starts from; None = none; Ellipsis = the newest in its folder
    ckpt_path: Any
    is_at_step_0: bool  # whether the run is known to start there (or resumes one that did)
    # steps between the validations of `StepBasedEvaluation`; None = not installed
    evaluates_every: int | None = None

    @classmethod
    def of(cls, plan: TrainerPlan) -> RunLength:
        """Return the length of a plan."""
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
        """An upper bound of the last step; None = unknown."""
        loop = self.loop
        bounds = [] if self.end is None else [self.end]
        if loop.max_steps is not None and loop.num_steps is None:
            bounds.append(loop.max_steps)
        if loop.num_epochs is not None and loop.steps_per_epoch is not None and self.is_at_step_0:
            bounds.append(loop.num_epochs * loop.steps_per_epoch)
        return min(bounds, default=None)

    @property
    def counts_from_0(self) -> bool:
        """Whether the run starts at step 0 and its end is known."""
        return self.end is not None and self.is_at_step_0

    @property
    def validations(self) -> EventSteps | None:
        """The steps with a validation; None if there is none, or they are unknown."""
        if self.evaluates_every is not None:
            return EventSteps(every=self.evaluates_every)
        frequency = self.loop.eval_frequency
        if not frequency or frequency == EPOCH:
            return None
        if not isinstance(frequency, float):
            return EventSteps(every=frequency)
        if frequency == 1.0:
            return EventSteps(every=None)
        if self.end is None:
            return None
        return EventSteps(every=max(1, math.ceil(frequency * self.end)))

    @property
    def checkpoints(self) -> EventSteps | None:
        """The steps with a checkpoint; None if there are none, or only the initial one."""
        first = 0 if self.has_initial_checkpoint else None
        times = self.checkpoint.times
        return EventSteps(every=times.steps, first=first) if self.checkpoint.saves_at_end else None

    @property
    def has_initial_checkpoint(self) -> bool:
        """Whether one is written before the first step of a new run."""
        return self.checkpoint.save_initial_checkpoint and self.ckpt_path in (None, ...)

    @property
    def log_lines(self) -> EventSteps:
        """Which steps are logged."""
        return EventSteps(every=self.logging.log_steps or None)


def _made(kind: Callable[..., Any], component: Component | None) -> Any:
    """Return a section as its core callback, which only stores the settings."""
    known = inspect.signature(kind).parameters
    given = {} if component is None else component.arguments
    return kind(**{name: value for name, value in given.items() if name in known})


def _given(plan: TrainerPlan, kind: type, name: str) -> list[int]:
    """Return an argument of the callbacks of a class."""
    callbacks = plan.init.get("callbacks", ())
    return [one.arguments[name] for one in callbacks if one.target is kind]


def _drops_the_step(plan: TrainerPlan) -> bool:
    """Return whether callbacks skip the step of a checkpoint, so that the run starts at 0."""
    filters = [
        component.make()
        for component in plan.init.get("callbacks", ())
        if component.target is LoadCheckpointStates
    ]
    return any("all" not in one.states and "global_step" not in one.states for one in filters)


def length_lines(plan: TrainerPlan) -> list[str]:
    """Return lines on the length of the run, with hints at settings without effect."""
    if plan.method is None:
        return []
    length = RunLength.of(plan)
    if plan.method != "fit":
        lines = row(_ROWS.get(plan.method, "validations"), _loaders(plan, length))
        return lines + _micro_batches(plan) + _written(plan)
    return [
        *row("steps", _steps(plan, length)),
        *_micro_batches(plan),
        *row("validations", _validations(plan, length)),
        *row("checkpoints", _checkpoints(plan, length)),
        *row("log lines", length.log_lines.describe(_counted(length))),
        *(
            line
            for hint in (*_hints(length), *_watched(plan, length))
            for line in row("hint", hint)
        ),
    ]


def _written(plan: TrainerPlan) -> list[str]:
    """Return the line on where predictions are written."""
    if plan.method != "predict":
        return []
    given = plan.call.get("output_dir")
    return row("output_dir", "predictions in model_dir (default)" if given is None else str(given))


def _counted(length: RunLength) -> int | None:
    """Return the last step of a run that has all steps from 1 up to it."""
    return length.end if length.counts_from_0 else None


# ---- steps


def _steps(plan: TrainerPlan, length: RunLength) -> str:
    loop = length.loop
    if loop.num_steps is not None:
        num = str(loop.num_steps) if length.is_at_step_0 else f"{loop.num_steps} more"
    elif loop.num_epochs is not None:
        num = _epochs(length)
    else:
        num = str(loop.max_steps)
        num += "" if length.is_at_step_0 else ", including those before the checkpoint"
    limit = "" if loop.max_time is None else f"; at most {loop.max_time!r} of wall-clock time"
    return f"{num}; each with {_batches(plan, loop.grad_accum_steps)}{limit}"


def _epochs(length: RunLength) -> str:
    num, each = length.loop.num_epochs, length.loop.steps_per_epoch
    epochs = "1 epoch" if num == 1 else f"{num} epochs"
    text = f"{epochs}; the number of steps depends on the data"
    if each is not None:
        text += f", at most {each} per epoch"
    return text if length.bound is None else f"{text}, at most {length.bound} in total"


def _batches(plan: TrainerPlan, num: int) -> str:
    size = _batch_size(plan, "train_dataloader")
    batches = "1 batch" if num == 1 else f"{num} batches"
    if size is None:
        return batches
    total = "" if num == 1 else f": {num * size}"
    return f"{batches} of {_samples(size)}{total}"


def _batch_size(plan: TrainerPlan, key: str) -> int | None:
    """Return the argument `batch_size` of a dataloader, if it has one."""
    dataloader = plan.call.get(key)
    given = dataloader.arguments if isinstance(dataloader, Component) else {}
    size = given.get("batch_size")
    return size if isinstance(size, int) else None


def _samples(num: int) -> str:
    return "1 sample" if num == 1 else f"{num} samples"


def _split(size: int, plan: TrainerPlan, key: str) -> str:
    text = f"at most {_samples(size)} each"
    batch = _batch_size(plan, key)
    if batch is None:
        return text
    num = math.ceil(batch / size)
    return f"{text}; {num} per batch of {batch}"


def _micro_batches(plan: TrainerPlan) -> list[str]:
    """Return lines on the micro-batches of training and validation."""
    sizes = micro_batch_sizes(plan)
    of = (
        ("train_dataloader", "training", sizes.train),
        (_val_key(plan), "validation", sizes.validate),
    )
    return [
        line
        for key, what, size in of
        if size is not None and plan.call.get(key)
        for line in row("micro-batches", f"{what}: {_split(size, plan, key)}")
    ]


# ---- validations


def _val_key(plan: TrainerPlan) -> str:
    return "val_dataloader" if plan.method in (None, "fit") else METHODS[plan.method].dataloader


def _loaders(plan: TrainerPlan, length: RunLength) -> str:
    """Return the batches and dataloaders of a validation."""
    given = plan.call.get(_val_key(plan))
    loaders = given if isinstance(given, list) else [] if given is None else [given]
    is_own = plan.method is not None and "eval_steps" in METHODS[plan.method].plain
    batches = plan.call.get("eval_steps") if is_own else length.loop.eval_steps
    each = "all batches" if batches is None else f"{batches} batch{'es' * (batches > 1)}"
    if not loaders:
        return f"no {_val_key(plan)}{_by_callbacks(plan)}"
    of = f"of {len(loaders)} dataloaders each" if len(loaders) > 1 else "of one dataloader"
    paths = plan.call.get("ckpt_paths")
    times = f", of each of {len(paths)} checkpoints or patterns" if isinstance(paths, list) else ""
    return f"{each} {of}{times}"


def _by_callbacks(plan: TrainerPlan) -> str:
    own = [one.target for one in plan.init.get("callbacks", ())]
    own += [type(one) for one in plan.defaults.get("callbacks", ())]
    names = [one.__name__ for one in own if listens(one, "run_validation")]
    return f"; only callbacks validate: {', '.join(names)}" if names else ""


def _validations(plan: TrainerPlan, length: RunLength) -> str:
    if plan.mode == "train":
        return "none (mode train)"
    frequency = length.loop.eval_frequency
    if not frequency and length.evaluates_every is None:
        return f"none (eval_frequency: {show(frequency)})"
    if not plan.call.get("val_dataloader") and not _by_callbacks(plan):
        return "none (no val_dataloader)"
    where = length.validations
    if frequency == EPOCH and length.evaluates_every is None:
        when = "at the end of each epoch, and of the run"
    elif where is None:
        assert isinstance(frequency, float)  # of a run whose length is not known
        when = f"after each {frequency * 100:g}% of the steps, and at the end"
    else:
        when = where.describe(_counted(length))
    return f"{when}; {_loaders(plan, length)}"


# ---- checkpoints


def _checkpoints(plan: TrainerPlan, length: RunLength) -> str:
    where = length.checkpoints
    if where is None:
        return (
            "only the initial one (checkpoint.steps is not set)"
            if length.has_initial_checkpoint
            else "none"
        )
    kept = [
        component.arguments["n"]
        for component in plan.init.get("callbacks", ())
        if component.target is KeepNCheckpoints and component.arguments.get("n") is not None
    ]
    num = min(kept, default=0)
    rest = f"; keeps the newest {num}" if num > 1 else "; keeps only the newest"
    rest = rest if kept else ""
    # The number of those by time or epochs is unknown.
    end = None if length.checkpoint.steps is None else _counted(length)
    return f"{where.describe(end)}{_more_times(length)}{rest}"


def _more_times(length: RunLength) -> str:
    """Return the times of checkpoints that do not depend on steps."""
    times = length.checkpoint.times
    more = ""
    if times.minutes is not None:
        more += f"; every {times.minutes:g} minutes"
    if times.epochs is not None:
        more += "; every epoch" if times.epochs == 1 else f"; every {times.epochs} epochs"
    if length.checkpoint.asynchronous:
        more += "; written in the background"
    return more


def _watched(plan: TrainerPlan, length: RunLength) -> Iterator[str]:
    """Yield hints about callbacks that watch a metric which is logged once or never."""
    given = plan.init.get("callbacks", ())
    kinds = [one.target for one in given] + [
        type(one) for one in plan.defaults.get("callbacks", ())
    ]
    if plan.mode == "train" or not are_shipped(kinds):  # others may validate by themselves
        return
    loop, steps = length.loop, _counted(length)
    validates = plan.call.get("val_dataloader") or _by_callbacks(plan)
    every = None if length.validations is None else length.validations.every
    num = num_validations(loop, every, end=steps) if validates else 0
    if length.evaluates_every is not None and validates:
        num = None
    watching = [
        (component.target, component.arguments.get("metric", ""))
        for component in given
        if hasattr(component.target, "with_one_value")
        and not is_for_several_fits(component.target, component.arguments.get("reset_on_fit"))
    ]
    if num is not None:
        yield from hints_for(watching, loop, num, steps, loop.steps_per_epoch)


# ---- settings without effect, or with an unexpected one


def _hints(length: RunLength) -> Iterator[str]:
    bound = length.bound
    steps: dict[str, tuple[Any, str]] = {
        "checkpoint.steps": (length.checkpoint.steps, "checkpoint"),
        "logging.log_steps": (length.logging.log_steps, "log line"),
    }
    frequency = length.loop.eval_frequency
    if isinstance(frequency, int):
        steps = {"loop.eval_frequency": (frequency, "validation"), **steps}
        if frequency == 1 and bound != 1:
            yield "loop.eval_frequency: 1 validates after every step, 1.0 once at the end"
    for name, (every, what) in steps.items():
        if every is not None and bound is not None and every > bound:
            few = f"{'' if bound == length.end else 'at most '}{bound} step{'s' * (bound > 1)}"
            gives = f"it gives only one {what}, at the end"
            yield f"{name} is {every}, but the run has {few}, so {gives}"
    if length.checkpoint.save_initial_checkpoint and not length.has_initial_checkpoint:
        yield "checkpoint.save_initial_checkpoint: no effect, as the run starts from a checkpoint"
