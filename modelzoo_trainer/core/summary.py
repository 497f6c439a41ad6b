"""The result of a run, updated while it is running."""

from __future__ import annotations

import math
import re
import time
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.metric_direction import direction_of, is_better
from modelzoo_trainer.callback import Batch, CoreCallback, Loader, Metrics, Outputs, StateDict
from modelzoo_trainer.core.parts.results import Best, RunResult
from modelzoo_trainer.core.parts.results_log import log_results, quiet_log, scopes_of
from modelzoo_trainer.core.parts.unlogged_metrics import (
    hint_at_not_scalar,
    hint_at_unlogged,
    metrics_among,
    not_scalar_tensors,
    why_not_logged,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_OWN_SCOPES: Final = frozenset({"test", "predict"})
"""Methods whose name is the scope of their metrics."""
_VALIDATION: Final = re.compile(r"(?:^|/)validate_\d+/")


class _Record:
    """One call of `fit`, `validate`, `validate_all`, `test` or `predict`."""

    def __init__(self, method: str, scope: str = "") -> None:
        self.method = method
        self.scope = scope
        self.last: Metrics = {}
        self.bests: dict[str, list[Best]] = {}
        """Successive best values, without values of repeated steps."""
        self.modes: dict[str, str] = {}
        """The directions of metrics whose best value is kept."""
        self.per_checkpoint: dict[Path, Metrics] = {}
        self.checkpoints: list[Path] = []
        self.last_checkpoint: Path | None = None
        self.begin = time.perf_counter()
        self.first_step: int | None = None
        self.failure: str | None = None
        self.returned: tuple[str, ...] | None = None
        """Metrics that the model returned in the first batch of a validation."""
        self.not_scalar: dict[str, str] = {}
        """What else looks like a metric but is not a scalar tensor, with what it is."""

    def note_best(
        self, metrics: Metrics, step: int, given: dict[str, str], *, has_new: bool
    ) -> None:
        """Record the best metrics; `given`: directions set by callbacks; `has_new`: new names."""
        if has_new:
            self._find_modes(metrics, given)
        for name, mode in self.modes.items():
            if name in metrics:
                self._note_best(name, mode, number_of(metrics[name]), step)

    def _find_modes(self, metrics: Metrics, given: dict[str, str]) -> None:
        for name in metrics:
            mode: str | None = given.get(name)
            if mode is None and _VALIDATION.search(name):
                mode = direction_of(name)
            if mode is not None:
                self.modes[name] = mode

    def _note_best(self, name: str, mode: str, value: float | None, step: int) -> None:
        if value is None or not math.isfinite(value):
            return
        bests = self.bests.setdefault(name, [])
        if not bests or is_better(value, bests[-1].value, mode):
            bests.append(Best(value, step))

    def go_back_to(self, step: int) -> None:
        """Remove the best values of steps that will be repeated."""
        for name, bests in self.bests.items():
            self.bests[name] = [best for best in bests if best.step <= step]


class Summary(CoreCallback):
    """Record the last and best metrics of a run, its checkpoints, and what stopped it.

    `trainer.result` comes from the last `fit`, `validate`, `validate_all`, `test` or `predict`,
    even if it raised an exception, such as Ctrl-C.
    """

    def __init__(self) -> None:
        self.result: RunResult | None = None
        self._open: list[_Record] = []
        self._given: dict[str, str] = {}
        self._has_hinted = False
        self._has_hinted_at_not_scalar = False
        self.unlogged: dict[str, str] = {}
        """Metrics that the model returned in a validation of the last fit, and why no logger got
        them; filled as validations end."""

    # ---- calls

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._given = dict(_given_modes(trainer))
        self.unlogged.clear()
        self._begin(trainer, stack, _Record("fit"))

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._open[0].first_step = trainer.global_step

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        scope = trainer.name_scope_path
        name = scope.removesuffix("/").rpartition("/")[2]
        method = name if name in _OWN_SCOPES else "validate"
        self._begin(trainer, stack, _Record(method, scope))

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        if not trainer.is_fitting:
            self._begin(trainer, stack, _Record("validate_all"))

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        record = self._open[-1] if self._open else None
        if record is not None and record.method == "validate_all" and ckpt_path is not None:
            record.last = record.per_checkpoint[ckpt_path] = {}

    def _begin(self, trainer: Trainer, stack: ExitStack, record: _Record) -> None:
        self._open.append(record)
        stack.callback(self._end, trainer, record)

    def _end(self, trainer: Trainer, record: _Record) -> None:
        self._open.remove(record)
        self.result = _result_of(trainer, record)
        returned: dict[str, str | None] = dict(record.not_scalar)
        if record.returned and trainer.val_is_complete:
            unlogged = [name for name in record.returned if record.scope + name not in record.last]
            returned |= dict.fromkeys(unlogged)
            self._has_hinted = self._has_hinted or hint_at_unlogged(trainer, unlogged, record.scope)
        if record.not_scalar and not self._has_hinted_at_not_scalar:
            self._has_hinted_at_not_scalar = hint_at_not_scalar(trainer, record.not_scalar)
        self.unlogged |= {
            record.scope + name: why_not_logged(what) for name, what in returned.items()
        }

    @override
    def on_validate_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        record = self._open[-1] if self._open else None
        if record is not None and record.returned is None:
            has_values = trainer.backend.caps.holds_values and trainer.backend.comm.is_main
            record.returned = metrics_among(outputs) if has_values else ()
            record.not_scalar = not_scalar_tensors(outputs) if has_values else {}

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._fail(exception)

    @override
    def on_validate_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._fail(exception)

    def _fail(self, exception: BaseException) -> None:
        text = str(exception).partition("\n")[0]
        for record in self._open:
            kind = type(exception).__name__
            record.failure = record.failure or (f"{kind}: {text}" if text else kind)

    # ---- results

    @property
    def is_evaluation(self) -> bool:
        """Whether `validate`, `validate_all`, `test` or `predict` is running, outside of a fit."""
        return bool(self._open) and all(record.method != "fit" for record in self._open)

    def so_far(self, trainer: Trainer) -> RunResult:
        """Return the result so far of the outermost running call.

        Raises:
            RuntimeError: If no call is running.
        """
        if not self._open:
            raise RuntimeError(
                "No fit, validate or predict is running. For the result of the last one, use "
                "trainer.result."
            )
        return _result_of(trainer, self._open[0])

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        for record in self._open:
            last = record.last
            num = len(last)
            last.update(metrics)
            if record.modes or len(last) != num:
                record.note_best(metrics, step, self._given, has_new=len(last) != num)
        if trainer.progress == "none" and trainer.backend.comm.is_main:
            is_of_training = trainer.is_fitting and "loss" in metrics
            if not is_of_training:  # no console logs the results of validations
                log_results(quiet_log, metrics, step, scopes_of(trainer))

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if trainer.is_resuming:
            for record in self._open:
                record.go_back_to(trainer.global_step)

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        self.note_checkpoint(ckpt_path)
        for record in self._open:
            record.last_checkpoint = ckpt_path

    def note_checkpoint(self, path: Path) -> None:
        """Add a checkpoint, also one of a callback, to the running calls."""
        for record in self._open:
            record.checkpoints.append(path)


def _given_modes(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the directions of metrics that callbacks watch."""
    found = [
        (getattr(one, "metric", ""), getattr(one, "mode", "")) for one in trainer.all_callbacks
    ]
    return [
        (metric, mode)
        for metric, mode in found
        if isinstance(metric, str) and isinstance(mode, str) and mode in ("min", "max")
    ]


def number_of(value: Any) -> float | None:
    """Return a metric as a float; None if it is not a number."""
    if isinstance(value, Tensor):
        value = value.item() if value.dim() == 0 and value.dtype.is_floating_point else None
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def _numbers(metrics: Metrics, scope: str = "") -> dict[str, float]:
    found = {name: number_of(value) for name, value in metrics.items() if name.startswith(scope)}
    return {name.removeprefix(scope): value for name, value in found.items() if value is not None}


def _result_of(trainer: Trainer, record: _Record) -> RunResult:
    step = trainer.global_step
    weights_step = loaded_step_of(trainer)
    bests = {name: found[-1] for name, found in record.bests.items() if found}
    last = record.last_checkpoint
    return RunResult(
        method=record.method,
        metrics=_numbers(record.last, record.scope),
        best={
            name.removeprefix(record.scope): best
            for name, best in bests.items()
            if name.startswith(record.scope)
        },
        first_step=record.first_step or 0,
        steps=0 if record.first_step is None else step - record.first_step,
        global_step=step,
        epochs=trainer.data.epoch,
        stopped_by=record.failure or _stopped_by(trainer, record),
        checkpoints=tuple(path for path in dict.fromkeys(record.checkpoints) if path.exists()),
        seconds=time.perf_counter() - record.begin,
        model_dir=trainer.model_dir,
        per_checkpoint={path: _numbers(found) for path, found in record.per_checkpoint.items()},
        last_checkpoint=last if last is not None and last.exists() else None,
        best_checkpoint=next(
            (one.best_path for one in trainer.all_callbacks if hasattr(type(one), "best_path")),
            None,
        ),
        weights_step=None if weights_step == step else weights_step,
    )


def loaded_step_of(trainer: Trainer) -> int | None:
    """Return the step of the best weights, if the model has them; else None."""
    steps = [getattr(callback, "loaded_step", None) for callback in trainer.all_callbacks]
    return next((step for step in steps if isinstance(step, int)), None)


def _stopped_by(trainer: Trainer, record: _Record) -> str | None:
    early_exit = trainer.early_exit
    reason = early_exit.reason if early_exit.should_exit else None
    if record.method == "fit":
        reason = None if trainer.schedule.is_finished(trainer) else reason
        return trainer.interruptions.stopped_by(trainer) or reason
    return reason
