"""Keeps the best checkpoints by a metric."""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import Callback, Loader, Metrics
from modelzoo_trainer.callbacks.metric_watch import MetricName, MetricWatch
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.side_checkpoints import (
    StepName,
    check_is_apart,
    free_path,
    part_names,
    remove,
    save_state,
    state_of,
    try_to_write,
)
from modelzoo_trainer.constraints import PositiveInt, checked
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_FACT = "save_best"


class BestCheckpoints:
    """Ranks checkpoints by a value, and keeps the first few of them on the disk.

    What it has written carries a mark in its manifest, which is part of the state. So a run that
    resumes finds what was written after its checkpoint, and takes it over instead of writing it
    again, and nothing else is ever deleted.

    `k`: how many to keep, > 0. `template`: their names, with the field `{step}`.
    """

    def __init__(self, k: int, mode: str, template: str) -> None:
        self._k = k
        self._sign = 1.0 if mode == "min" else -1.0
        self._template = template
        self._mark = secrets.token_hex(8)
        self.entries: list[dict[str, Any]] = []
        """Best first: `name`, `step`, `value`."""

    def has_place_for(self, value: float) -> bool:
        """Return whether a value would be among the best."""
        return self._rank(value) < self._k

    def _rank(self, value: float) -> int:
        """Return how many are at least as good: of equal ones the earlier is better."""
        return sum(self._sign * entry["value"] <= self._sign * value for entry in self.entries)

    def forget(self) -> None:
        """Begin anew; what was kept so far stays on the disk."""
        self._mark = secrets.token_hex(8)
        self.entries = []

    def name_of(self, step: int) -> str:
        """Return the name of a step's checkpoint, if it is not in use."""
        return self._template.format(step=step)

    def add(self, name: str, step: int, value: float) -> None:
        """Put a checkpoint in its place; those behind the k-th are no longer listed."""
        self.entries.insert(self._rank(value), {"name": name, "step": step, "value": value})
        del self.entries[self._k :]

    # ---- on the disk

    def find_or_name(self, root: Path, step: int, facts: dict[str, Any]) -> tuple[str, bool]:
        """Return the name of a step's checkpoint, and whether it was written before a restart."""
        for path, manifest in self._own(root).items():
            is_same = manifest.step == step and manifest.facts == facts
            if is_same and not checkpointing.verify(path):
                return path.name, True
        return free_path(root / self.name_of(step)).name, False

    def facts(self, metric: str, value: float) -> dict[str, Any]:
        """Return what a manifest says of a checkpoint that this object writes."""
        return {_FACT: self._mark, "metric": metric, "value": value}

    def sweep(self, root: Path, step: int) -> None:
        """Delete what was written and is not listed; what a restart left is found when due."""
        listed = {entry["name"] for entry in self.entries}
        for path, manifest in self._own(root).items():
            if path.name not in listed and manifest.step <= step:
                remove(path)

    def _own(self, root: Path) -> dict[Path, checkpointing.Manifest]:
        before, after = self._template.split("{step}")
        pattern = re.compile(rf"{re.escape(before)}\d+{re.escape(after)}(_\d+)?")
        found = {}
        for info in checkpointing.list_checkpoints(root):
            if pattern.fullmatch(info.path.name):
                manifest = checkpointing.read_manifest(info.path)
                if manifest.facts.get(_FACT) == self._mark:
                    found[info.path] = manifest
        return found

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the list and the mark."""
        return {"best": [dict(entry) for entry in self.entries], "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.entries = [dict(entry) for entry in state["best"]]
        self._mark = state["mark"]


_NAME: Final = "SaveBest.checkpoint_name"
_STATES: Final = "SaveBest.checkpoint_states"


class SaveBest(Callback):
    """Keeps checkpoints of the weights that had the best values of a metric.

    They are written beside the run's own checkpoints, as soon as the value of the weights as they
    are has arrived: that of a validation before the next step. They are never resumed from
    automatically. A worse one is deleted when the better one has been committed, also by the run
    that resumes this one, and nothing is deleted that this callback did not write.

    Values that are not finite are never best; of equal values the earlier is kept. A value that
    arrives when the weights have moved on (of a training step, on some devices) is not used. If a
    checkpoint cannot be written that is logged; the run continues.

    Args:
        metric: Its name as the loggers see it, such as `validate_0/loss`.
        mode: Whether the least or the greatest value is best.
        k: How many checkpoints to keep, > 0.
        checkpoint_states: Names of top-level parts such as `model` and `optimizer` to save: a
            list, or a text with commas; "all" = everything.
        checkpoint_name: Their names; holds the field `{step}` once.
        load_best: Whether the model has the best weights when a fit has ended, unless it was
            interrupted. A fit in which the metric never came ends with an error. The run's own last
            checkpoint has those of the last step, from which a run resumes; callbacks behind this
            one see the best.
        reset_on_fit: Whether each fit starts afresh and leaves what earlier ones have kept; False =
            continues from the previous one. A fit that resumes from a checkpoint of the run does so
            in any case.

    State: The best values with their checkpoints, a value whose checkpoint is not written yet, and
        a mark by which the run's own ones are known.

    Raises:
        ConfigError: If an argument does not fit; when the metric arrives, if it is not a number; at
            the end of a fit, if it never came and `load_best` asks for its weights.
    """

    needs_trainer = True

    state_is_of_run = True

    @checked()
    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        metric: MetricName,
        mode: Literal["min", "max"] = "min",
        k: PositiveInt = 1,
        checkpoint_states: str | list[str] = "all",
        checkpoint_name: StepName = "best_{step}",
        load_best: bool = False,
        reset_on_fit: bool = False,
    ) -> None:
        self._watch = MetricWatch("SaveBest", metric)
        self.states = part_names(_STATES, checkpoint_states)
        if load_best and not {"all", "model"} & set(self.states):
            raise ConfigError(
                f"SaveBest.load_best is true, but {_STATES} is {checkpoint_states!r}: there would "
                f"be no weights to load. Add 'model'."
            )
        self.load_best = load_best
        self.reset_on_fit = reset_on_fit
        self._best = BestCheckpoints(k, mode, checkpoint_name)
        self._arrived: tuple[float, int] | None = None
        self._is_told = False
        self._has_validated = False
        self._has_trained = False
        self._had_best = False  # of an earlier fit

    @property
    def metric(self) -> str:
        """Which metric decides."""
        return self._watch.metric

    @property
    def best(self) -> list[dict[str, Any]]:
        """The checkpoints that are kept, best first: `name`, `step` and `value` of each."""
        return [dict(entry) for entry in self._best.entries]

    # ---- values

    @override
    def setup(self, trainer: Trainer) -> None:
        check_is_apart(_NAME, trainer, self._best.name_of(0))

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._watch.begin()
        self._has_validated = self._has_trained = False
        self._had_best = bool(self._best.entries)
        self._warn_of_averages(trainer)
        if self.reset_on_fit:
            self._best.forget()
        stack.callback(setattr, self, "_arrived", None)

    def _warn_of_averages(self, trainer: Trainer) -> None:
        scopes = [one.name_scope for one in trainer.get_callbacks(ModelEma) if one.validates]
        if self.load_best and any(self.metric.startswith(f"{scope}/") for scope in scopes):
            log.warning(
                "SaveBest.load_best: %s is of averaged weights. The model will have the weights "
                "that it trained with at that step, and not their average, which is in the "
                "checkpoint (checkpoint_states: all) and in ModelEma.swap() for the last step.",
                self.metric,
            )

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if not trainer.is_fitting:  # a validation of whatever checkpoint
            return
        value = self._watch.value_in(metrics)
        if value is not None:
            self._arrived = (value, step)

    # ---- when

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._has_trained = True
        trainer.drain()  # what validations have logged
        self._watch.warn_if_missing()
        self._use(trainer)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._has_validated = self._has_validated or trainer.val_is_complete

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        if self._arrived is not None:  # of the epoch before
            self._use(trainer)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self._arrived is not None:
            self._use(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        trainer.drain()
        self._use(trainer)
        self._sweep(trainer)
        if self._watch.hint and not self._best.entries:
            log.warning(
                "SaveBest: no metric %r was logged, so there is no best checkpoint. %s",
                self.metric,
                self._watch.hint,
            )
        if self.load_best and trainer.backend.caps.holds_values and not trainer.interrupted:
            self._load(trainer)

    def _use(self, trainer: Trainer) -> None:
        """Use the value that has arrived, if it is that of the weights as they are."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or not trainer.backend.caps.holds_values:
            return
        # Of a metric that each process has for itself, the first one's counts.
        value, step = trainer.backend.comm.broadcast_object(arrived)
        if step != trainer.global_step:
            self._tell_late(step, trainer.global_step)
        elif not math.isfinite(value):
            log.info("%s is %s at step %d, which is never best.", self.metric, value, step)
        elif self._best.has_place_for(value):
            self._save(trainer, value)

    def _tell_late(self, step: int, now: int) -> None:
        if not self._is_told:
            log.warning(
                "SaveBest: %s of step %d arrived at step %d, when its weights were gone: it is not "
                "used, nor are others like it. Name a metric of a validation.",
                self.metric,
                step,
                now,
            )
        self._is_told = True

    # ---- what

    def _save(self, trainer: Trainer, value: float) -> None:
        state = self._state(trainer, value)
        step, backend = trainer.global_step, trainer.backend
        root, facts = trainer.checkpoint.root(trainer), self._best.facts(self.metric, value)
        found = self._best.find_or_name(root, step, facts) if backend.comm.is_main else None
        name, is_written = backend.comm.broadcast_object(found)
        if not is_written:
            if backend.comm.process_group is not None:
                trainer.checkpoint.finish(trainer)  # one that is in progress speaks in the group
            write = partial(save_state, trainer, root / name, state, facts)
            if not try_to_write(write, f"NO BEST CHECKPOINT WAS WRITTEN at step {step}"):
                return
        self._best.add(name, step, value)
        log.info("%s is %.6g at step %d: kept as %s.", self.metric, value, step, name)
        self._sweep(trainer)

    def _sweep(self, trainer: Trainer) -> None:
        if trainer.backend.comm.is_main:
            self._best.sweep(trainer.checkpoint.root(trainer), trainer.global_step)

    def _load(self, trainer: Trainer) -> None:
        """Give the model the best weights, if there are any."""
        if not self._best.entries or (self._had_best and self._has_trained):
            self._require_metric(trainer)
        if not self._best.entries:
            log.warning("SaveBest: there are no best weights to load; the model has the last ones.")
            return
        entry = self._best.entries[0]
        path = trainer.checkpoint.root(trainer) / entry["name"]
        trainer.callbacks["model"].on_load_checkpoint(
            trainer, {"model": trainer.checkpoint.read(trainer, path)["model"]}
        )
        log.info(
            "The model has the weights of step %d, the best by %s.", entry["step"], self.metric
        )

    def _require_metric(self, trainer: Trainer) -> None:
        """Raise a `ConfigError` if the metric never came, though the fit had time for it."""
        if self._watch.is_missing and (self._has_validated or not trainer.early_exit.should_exit):
            raise ConfigError(
                f"SaveBest.metric: {self.metric!r} was never logged in this fit, so load_best has "
                f"no weights of it to load; the model has those of step {trainer.global_step}. "
                f"{self._watch.advice}"
            )

    def _state(self, trainer: Trainer, value: float) -> dict[str, Any]:
        """Return what is to be saved, in which this value is still to be used."""
        self._arrived = (value, trainer.global_step)
        try:
            return state_of(trainer, _STATES, self.states)
        finally:
            self._arrived = None

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return what is best so far, and a value whose checkpoint is not written yet."""
        arrived = None if self._arrived is None else list(self._arrived)
        return {**self._best.state_dict(), "arrived": arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these."""
        self._best.load_state_dict(state)
        arrived = state["arrived"]
        self._arrived = None if arrived is None else (arrived[0], arrived[1])
