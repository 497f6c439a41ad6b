"""Checkpoints with the best values of a metric."""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.base.metric_direction import Direction, is_better
from modelzoo_trainer.callback import Callback, Loader, Metrics
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.parts.metric_watch import MetricName, MetricWatch
from modelzoo_trainer.callbacks.parts.side_checkpoints import (
    StepName,
    check_is_apart,
    free_path,
    part_names,
    remove,
    save_state,
    state_of,
    try_to_write,
)
from modelzoo_trainer.checkpointing.stores.pulling import is_only_in_store
from modelzoo_trainer.core.checkpoint import saving
from modelzoo_trainer.core.parts.named_checkpoints import FACT
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


class BestCheckpoints:
    """Rank checkpoints by a value, and keep the best few on disk.

    Each is marked in its manifest with an id, which is part of the state. So a resumed run finds
    what was written after its checkpoint and adopts it instead of writing it again, and no other
    checkpoint is ever deleted.

    `k`: number to keep, > 0. `template`: name pattern, with the field `{step}`.
    """

    def __init__(self, k: int, mode: str, template: str) -> None:
        self._k = k
        self.mode = mode
        self._template = template
        self._mark = secrets.token_hex(8)
        self.entries: list[dict[str, Any]] = []
        """Best first: `name`, `step`, `value`."""

    def has_place_for(self, value: float) -> bool:
        """Return whether a value would be among the best."""
        return self._rank(value) < self._k

    def _rank(self, value: float) -> int:
        """Return the number of values that are at least as good; the earlier of equal ones wins."""
        return sum(not is_better(value, entry["value"], self.mode) for entry in self.entries)

    def reset(self) -> None:
        """Reset; checkpoints that were kept so far stay on disk."""
        self._mark = secrets.token_hex(8)
        self.entries = []

    def name_of(self, step: int) -> str:
        """Return the name of a step's checkpoint, if it is not in use."""
        return self._template.format(step=step)

    def add(self, name: str, step: int, value: float) -> None:
        """Insert a checkpoint by its rank; those beyond the k-th are removed from the list."""
        self.entries.insert(self._rank(value), {"name": name, "step": step, "value": value})
        del self.entries[self._k :]

    # ---- on disk

    def find_or_name(self, root: Path, step: int, facts: dict[str, Any]) -> tuple[str, bool]:
        """Return the name of a step's checkpoint, and whether it was written before a restart."""
        for path, manifest in self._own(root).items():
            is_same = manifest.step == step and {"mode": self.mode, **manifest.facts} == facts
            if is_same and (is_only_in_store(path) or not checkpointing.verify(path)):
                return path.name, True
        return free_path(root / self.name_of(step)).name, False

    def facts(self, metric: str, value: float) -> dict[str, Any]:
        """Return the entries of the manifest of a checkpoint that this object writes."""
        return {FACT: self._mark, "metric": metric, "mode": self.mode, "value": value}

    def sweep(self, root: Path, step: int) -> None:
        """Delete own checkpoints up to a step that are not listed."""
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
                if manifest.facts.get(FACT) == self._mark:
                    found[info.path] = manifest
        return found

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the list and the mark."""
        return {"best": [dict(entry) for entry in self.entries], "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.entries = [dict(entry) for entry in state["best"]]
        self._mark = state["mark"]


_NAME: Final = "SaveBest.checkpoint_name"
_STATES: Final = "SaveBest.checkpoint_states"


class SaveBest(Callback):
    """Keep the checkpoints with the best values of a metric.

    They are written beside the run's own checkpoints as soon as a value of the current weights is
    available; after a validation, that is before the next step. A run never resumes from them
    automatically. A worse one is deleted when a better one has been committed, also by a resumed
    run; nothing that this callback did not write is deleted.

    Non-finite values are never best; of values that differ by less than a millionth, the earlier
    one is kept. A value of other weights than those that would be saved is ignored, with a warning:
    a training metric such as `loss`, which is of the weights before the step; a value that is
    available only after the weights have changed; and one that is logged inside `ModelEma.swap()`.
    If a checkpoint cannot be written, an error is logged; the run continues.

    The attribute `best` is a list of the kept checkpoints, best first, each a dict with `name`,
    `step` and `value`. `best_path` is the path of the first; None = none yet. `metric` and `mode`
    are the arguments, with the mode that was chosen by the name.

    Args:
        metric: Name of the metric as loggers receive it, such as `validate_0/loss`.
        mode: Whether a smaller ("min") or a larger ("max") value is better; None = by the name:
            "max" for accuracy, F1, AUC and the like, otherwise "min".
        k: Number of checkpoints to keep, > 0.
        checkpoint_states: Names of top-level parts such as `model` and `optimizer` to save: a list
            or a comma-separated string; "all" = everything.
        checkpoint_name: Name pattern; contains the field `{step}` once.
        load_best: Whether to load the best weights into the model at the end of a fit, unless it
            was interrupted. A fit in which the metric was never logged ends with an error. The
            run's final checkpoint, from which it resumes, has the last weights; callbacks after
            this one see the best ones. A new process gets them with `ckpt_path="best"`.
        reset_on_fit: Whether to reset the state in each fit and keep earlier checkpoints; False =
            continue from the previous fit. A fit that resumes from a checkpoint of the run never
            resets it.

    State: The best values with their checkpoints, a value whose checkpoint is not written yet, and
        the mark of the checkpoints of this run.

    Raises:
        ConfigError: If an argument is invalid; when the metric is logged, if it is not a number; at
            the end of a fit with `load_best`, if it was never logged.
    """

    needs_trainer = True

    state_is_of_run = True

    with_one_value: Final = "the best weights are the last ones"
    """The effect if the metric is logged only at the end, for a hint."""

    @checked()
    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        metric: MetricName,
        mode: Direction | None = None,
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
                f"SaveBest.load_best is true, but {_STATES} is {checkpoint_states!r}: the "
                f"checkpoints would have no weights to load. Add 'model' to checkpoint_states."
            )
        self.load_best = load_best
        self.reset_on_fit = reset_on_fit
        self._best = BestCheckpoints(k, self._watch.mode_or_default(mode), checkpoint_name)
        self._root: Path | None = None
        self._arrived: tuple[float, int] | None = None
        self._has_warned = False
        self._has_trained = False
        self._had_best = False  # in an earlier fit
        self.loaded_step: int | None = None
        """The step of the best weights, while the model has them."""

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return self._watch.metric

    @property
    def best(self) -> list[dict[str, Any]]:
        """The kept checkpoints, best first: `name`, `step` and `value` of each."""
        return [dict(entry) for entry in self._best.entries]

    @property
    def mode(self) -> str:
        """Whether a smaller ("min") or a larger ("max") value is better."""
        return self._best.mode

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint; None = none yet. `ckpt_path="best"` finds it in a new process."""
        if self._root is None or not self._best.entries:
            return None
        return self._root / str(self._best.entries[0]["name"])

    # ---- values

    @override
    def setup(self, trainer: Trainer) -> None:
        check_is_apart(_NAME, trainer, self._best.name_of(0))
        self._root = trainer.checkpoint.root(trainer)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._watch.begin(trainer.summary.unlogged)
        self._has_trained = False
        self._had_best = bool(self._best.entries)
        self._warn_of_averages(trainer)
        if self.reset_on_fit:
            self._best.reset()
        stack.callback(setattr, self, "_arrived", None)

    def _warn_of_averages(self, trainer: Trainer) -> None:
        scopes = [one.name_scope for one in trainer.get_callbacks(ModelEma) if one.validates]
        if not any(self.metric.startswith(f"{scope}/") for scope in scopes):
            return
        if not {"all", "callbacks"} & set(self.states):
            log.warning(
                "SaveBest: %s is a metric of the averaged weights, but %s is %s: the best "
                "checkpoints will have the trained weights of that step. Use 'all', or add "
                "'callbacks', to save the averaged ones, too.",
                self.metric,
                _STATES,
                ",".join(self.states),
            )
        if self.load_best:
            log.warning(
                "SaveBest.load_best: %s is a metric of the averaged weights, but the model will "
                "get the trained weights of that step. The averaged weights are in the best "
                "checkpoint if checkpoint_states is 'all'; the averages of the last step "
                "can be used inside 'with ema.swap()'.",
                self.metric,
            )

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if not trainer.is_fitting:  # validation of another checkpoint
            return
        value = self._watch.value_in(metrics)
        if value is None:
            return
        if trainer.logging.of_batch:
            self._warn_once(
                "SaveBest: ignored %s of step %d, because it is of a training batch: of the "
                "weights before that step, which are not saved. This warning is not repeated. Use "
                "a validation metric, or log one in on_step_boundary.",
                step,
            )
        elif self._is_of_average(trainer):
            self._warn_once(
                "SaveBest: ignored %s of step %d, because the model had the averaged weights of "
                "ModelEma, and the trained ones are saved. This warning is not repeated. Validate "
                "outside 'with ema.swap()', or use the metrics of ModelEma's own validations.",
                step,
            )
        else:
            self._arrived = (value, step)

    def _is_of_average(self, trainer: Trainer) -> bool:
        """Return whether the model has averaged weights, though the metric is not named so."""
        return any(
            ema.has_average
            and ema.average.is_swapped
            and not self.metric.startswith(f"{ema.name_scope}/")
            for ema in trainer.get_callbacks(ModelEma)
        )

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
        self.loaded_step = None
        trainer.drain()  # read the metrics of validations
        self._watch.warn_if_missing()
        self._use(trainer)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._watch.note_validation(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        if self._arrived is not None:  # of the previous epoch
            self._use(trainer)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self._arrived is not None:
            self._use(trainer)

    @override
    def on_step_committed(self, trainer: Trainer) -> None:
        if self.metric in trainer.logging.collected:  # logged by another one at the boundary
            trainer.logging.deliver(trainer)
            self._use(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        trainer.drain()
        self._use(trainer)
        self._sweep(trainer)
        if self._watch.hint and not self._best.entries:
            self._explain_none(trainer)
        if self.load_best and trainer.backend.caps.holds_values and not trainer.interrupted:
            self._load(trainer)

    def _explain_none(self, trainer: Trainer) -> None:
        if self._watch.had_time(trainer):
            log.warning(
                "SaveBest: no metric %r was logged, so there is no best checkpoint. %s",
                self.metric,
                self._watch.hint,
            )
        else:
            log.info(
                "SaveBest: there is no best checkpoint, because the fit stopped before its first "
                "validation (%s was not logged).",
                self.metric,
            )

    def _use(self, trainer: Trainer) -> None:
        """Use the value that has arrived, if it belongs to the current weights. Collective.

        If the metric differs between processes, the main process's value is used.
        """
        arrived, self._arrived = self._arrived, None
        if trainer.backend.caps.holds_values:
            arrived = trainer.backend.comm.broadcast_object(arrived)
        if arrived is None or not trainer.backend.caps.holds_values:
            return
        value, step = arrived
        if step != trainer.global_step:
            self._warn_late(step, trainer.global_step)
        elif not math.isfinite(value):
            log.info(
                "SaveBest: ignored %s = %s at step %d: NaN or infinity cannot be the best.",
                self.metric,
                value,
                step,
            )
        elif self._best.has_place_for(value):
            with saving(trainer):
                self._save(trainer, value)

    def _warn_late(self, step: int, now: int) -> None:
        self._warn_once(
            "SaveBest: ignored %s of step %d, because it was available only at step %d, after the "
            "weights had changed. This warning is not repeated. Use a validation metric.",
            step,
            now,
        )

    def _warn_once(self, text: str, *steps: int) -> None:
        if not self._has_warned:
            log.warning(text, self.metric, *steps)
        self._has_warned = True

    # ---- writing

    def _save(self, trainer: Trainer, value: float) -> None:
        state = self._state(trainer, value)
        step, backend = trainer.global_step, trainer.backend
        root, facts = trainer.checkpoint.root(trainer), self._best.facts(self.metric, value)
        found = self._best.find_or_name(root, step, facts) if backend.comm.is_main else None
        name, is_written = backend.comm.broadcast_object(found)
        if not is_written:
            if backend.comm.process_group is not None:
                trainer.checkpoint.finish(trainer)  # its collectives must not interleave with these
            write = partial(save_state, trainer, root / name, state, facts)
            if not try_to_write(
                write, f"SaveBest: failed to write the best checkpoint at step {step}"
            ):
                return
        self._best.add(name, step, value)
        rank = "New best" if self._best.entries[0]["name"] == name else "Among the best:"
        log.info("%s %s %.5g: saved %s.", rank, self.metric, value, name)
        self._sweep(trainer)

    def _sweep(self, trainer: Trainer) -> None:
        if trainer.backend.comm.is_main:
            self._best.sweep(trainer.checkpoint.root(trainer), trainer.global_step)

    def _load(self, trainer: Trainer) -> None:
        """Load the best weights into the model, if there are any."""
        if not self._best.entries or (self._had_best and self._has_trained):
            self._require_metric(trainer)
        if not self._best.entries:
            log.warning("SaveBest: no best checkpoint to load; the model keeps its last weights.")
            return
        entry = self._best.entries[0]
        path = trainer.checkpoint.root(trainer) / entry["name"]
        trainer.callbacks["model"].on_load_checkpoint(
            trainer, {"model": trainer.checkpoint.read(trainer, path)["model"]}
        )
        self.loaded_step = entry["step"]
        log.info(
            "Loaded the weights of step %d, with the %s %s (%.6g).",
            entry["step"],
            "lowest" if self.mode == "min" else "highest",
            self.metric,
            entry["value"],
        )

    def _require_metric(self, trainer: Trainer) -> None:
        """Raise a `ConfigError` if the metric was never logged, though the fit had time for it."""
        if self._watch.is_missing and self._watch.had_time(trainer):
            raise ConfigError(
                f"SaveBest.metric: {self.metric!r} was never logged in this fit, so load_best has "
                f"no best weights to load; the model has the weights of step "
                f"{trainer.global_step}. {self._watch.advice}"
            )

    def _state(self, trainer: Trainer, value: float) -> dict[str, Any]:
        """Return what to save, with this value still to be used."""
        self._arrived = (value, trainer.global_step)
        try:
            return state_of(trainer, _STATES, self.states)
        finally:
            self._arrived = None

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self.loaded_step = None

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self.loaded_step not in (None, trainer.global_step):
            log.warning(
                "SaveBest.load_best: %s has the best weights, of step %d, with the rest of the "
                "state of step %d. A run that resumes from it continues from these weights.",
                ckpt_path.name,
                self.loaded_step,
                trainer.global_step,
            )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the best values, and a value whose checkpoint is not written yet."""
        arrived = None if self._arrived is None else list(self._arrived)
        return {**self._best.state_dict(), "arrived": arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._best.load_state_dict(state)
        arrived = state["arrived"]
        self._arrived = None if arrived is None else (arrived[0], arrived[1])
