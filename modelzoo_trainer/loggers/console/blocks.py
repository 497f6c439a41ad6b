"""The texts before and after a fit: its configuration and its results."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.base.devices import speed_of
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.checkpointing.stores.mirror import located
from modelzoo_trainer.core.parts.results import RunResult, count_parameters
from modelzoo_trainer.core.parts.results_log import number
from modelzoo_trainer.core.parts.run_hints import hints_of, product_dtype
from modelzoo_trainer.loggers.console.bar import duration
from modelzoo_trainer.loggers.console.display import rate
from modelzoo_trainer.loggers.console.harmless import known

if TYPE_CHECKING:
    from torch import Tensor

    from modelzoo_trainer.base.devices import Backend
    from modelzoo_trainer.trainer import Trainer

_WIDTH: Final = 100
_LABEL: Final = 13
_MOST_ROWS: Final = 8


# ---- before


def start_block(trainer: Trainer, val_dataloader: Any) -> str:
    """Return the summary before a fit, without rows that fail."""
    rows: dict[str, Callable[[], str]] = {
        "speed": lambda: speed_of(trainer.backend, product_dtype(trainer)),
        "data": lambda: _data(trainer),
        "length": lambda: _length(trainer),
        "validation": lambda: _validation(trainer, val_dataloader),
        "checkpoints": lambda: _checkpoints(trainer),
        "start": lambda: _origin(trainer),
        "folder": lambda: _place_of(trainer.model_dir),
    }
    found = {label: known(text, "") for label, text in rows.items()}
    lines = [known(lambda: _head(trainer), "Training")]
    lines += [_row(label, text) for label, text in found.items() if text]
    lines += [_row("hint", hint) for hint in hints_of(trainer, val_dataloader)]
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    line = f"  {label + ':':{_LABEL}}{text}"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=" " * (_LABEL + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(trainer: Trainer) -> str:
    params = list(trainer.model.parameters())
    num, num_trained = count_parameters(params)
    parameters = f"{num:,} parameters"
    if num_trained != num:
        parameters += f", {num_trained:,} of them trained"
    num_processes = trainer.backend.comm.world_size
    where = _device(trainer.backend)
    where += f", {num_processes} processes" if num_processes > 1 else ""
    name = type(trainer.model).__name__
    return f"Training {name} ({parameters}) on {where}, {_precision(trainer, params)}"


def _device(backend: Backend) -> str:
    """Return the device, after the name of a user's own backend."""
    device, is_shipped = str(backend.device), type(backend).__module__.startswith("backends.")
    return device if is_shipped or backend.name == device else f"{backend.name} ({device})"


def _precision(trainer: Trainer, params: Iterable[Tensor]) -> str:
    if trainer.precision.autocast is not None:
        kind = str(getattr(trainer.precision, "fp16_type", "half"))
        return f"{kind.removeprefix('c')} mixed precision"
    dtypes = {str(param.dtype).removeprefix("torch.") for param in params}
    return " and ".join(sorted(dtypes)) or "no parameters"


def _data(trainer: Trainer) -> str:
    data, schedule = trainer.data, trainer.schedule
    size = known(data.samples_per_batch, None)
    of_size = f" of {_counted(size, 'sample')}" if size else ""
    num = data.num_batches_per_epoch()
    if num is None:
        return f"batches{of_size}, number per epoch unknown"
    text = f"{_counted(num, 'batch', 'batches')}{of_size} per epoch"
    steps = schedule.steps_per_epoch
    return text if steps is None else f"{text}, {_counted(steps, 'step')} per epoch"


def _counted(num: int, one: str, several: str | None = None) -> str:
    return f"{num:,} {one if num == 1 else several or one + 's'}"


def _length(trainer: Trainer) -> str:
    schedule, loop = trainer.schedule, trainer.schedule.loop
    assert loop is not None  # of a fit
    parts = []
    if schedule.end_epoch < float("inf"):
        parts.append(_counted(int(schedule.end_epoch), "epoch"))
    total = schedule.total_steps
    if total is not None and not trainer.global_step:
        parts.append(_counted(total, "step"))
    text = " = ".join(parts)
    if total is not None and trainer.global_step:
        left = _counted(total - trainer.global_step, "step")
        text = ", ".join([*parts, f"to step {total:,}", f"{left} left"])
    text = text or "until the data ends"
    if loop.grad_accum_steps > 1:
        text += f", each with {loop.grad_accum_steps} batches"
    return text if loop.max_time is None else f"{text}; at most {loop.max_time} of time"


def _validation(trainer: Trainer, val_dataloader: Any) -> str:
    schedule = trainer.schedule
    if not schedule.validates or (val_dataloader is None and not trainer.validation_callbacks):
        return "none"
    frequency: Any = schedule.loop.eval_frequency if schedule.loop is not None else None
    if isinstance(frequency, str):
        return f"every {frequency}"
    every = schedule.validates_every
    return "at the end" if every is None else f"every {_counted(every, 'step')}, and at the end"


def _checkpoints(trainer: Trainer) -> str:
    checkpoint = trainer.checkpoint
    times = checkpoint.times
    found = []
    if times.steps is not None:
        found.append(f"every {_counted(times.steps, 'step')}")
    if times.minutes is not None:
        found.append(f"every {times.minutes:g} minutes")
    if times.epochs is not None:
        found.append(f"every {_counted(times.epochs, 'epoch')}")
    if checkpoint.saves_at_end:
        found.append("at the end")
    return ", ".join(found) or "none (checkpoint.steps is not set)"


def _origin(trainer: Trainer) -> str:
    step = trainer.global_step
    path, saved_step = trainer.checkpoint.begun_with
    if path is not None and saved_step == step:
        return f"resumed from {path.name} at step {step}"
    if step:
        return f"continues at step {step}"
    return "new run" if path is None else f"new run with the weights of {shown_path(path)}"


# ---- after


def end_block(result: RunResult, step_s: float | None, num_samples: int | None) -> str:
    """Return the summary after a fit.

    `step_s`: seconds per training step; None = not known. `num_samples`: per step.
    """
    lines = [_how_it_ended(result)]
    lines += _table(result)
    if step_s is not None:
        lines.append(_row("throughput", _throughput(step_s, num_samples)))
    if result.weights_step is not None:
        lines.append(_row("weights", f"of step {result.weights_step} (best)"))
    if result.checkpoints:
        lines.append(_row("checkpoints", _paths(result)))
    return "\n".join(lines)


def _how_it_ended(result: RunResult) -> str:
    stopped = result.stopped_by
    how = "Finished" if stopped is None else f"Stopped ({stopped})"
    epochs = f", {_counted(result.epochs, 'epoch')} completed" if result.epochs else ""
    steps = _counted(result.steps, "step")
    return f"{how} at step {result.global_step}{epochs}: {steps} in {_time(result.seconds)}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _throughput(step_s: float, num_samples: int | None) -> str:
    samples = "" if num_samples is None else f", {num_samples / step_s:,.0f} samples/s"
    return f"{rate(step_s, 'step')}{samples} while training (without validation and saving)"


def _table(result: RunResult) -> list[str]:
    """Return the table of loss and validation metrics: last, best and its step."""
    names = [name for name in result.metrics if name == "loss" or _is_telling(name, result)]
    names.sort(key=lambda name: name != "loss")
    title = f"best since {result.first_step}" if result.first_step else "best"
    rows = [("metric", "last", title, "at step")] if names else []
    for name in names[:_MOST_ROWS]:
        best = result.best.get(name)
        shown = ("", "") if best is None else (number(best.value), str(best.step))
        rows.append((name, number(result.metrics[name]), *shown))
    if all(not row[2] for row in rows[1:]):
        rows = [(name, last, "", "") for name, last, *_ in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    lines = ["  " + _cells(row, widths) for row in rows]
    more = len(names) - _MOST_ROWS
    return lines + ([f"  and {more} more in trainer.result.metrics"] if more > 0 else [])


def _is_telling(name: str, result: RunResult) -> bool:
    return name in result.best or "validate_" in name


def _cells(row: tuple[str, ...], widths: list[int]) -> str:
    name, *values = row
    cells = [f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True) if width]
    return "  ".join([f"{name:{widths[0]}}", *cells]).rstrip()


def _paths(result: RunResult) -> str:
    paths = result.checkpoints
    folders = {path.parent for path in paths}
    folder = os.path.commonpath(folders) if len(folders) > 1 else str(folders.pop())
    names = [os.path.relpath(path, folder) for path in paths]
    if len(names) > 3:
        last = os.path.relpath(result.last_checkpoint or paths[-1], folder)
        return f"{len(names)} written by this fit in {_place_of(folder)}, the last is {last}"
    return f"{', '.join(names)} in {_place_of(folder)}"


def _place_of(folder: str | Path) -> str:
    """Return a folder as messages show it; for the local copy of an object store, both."""
    mirror, name = located(folder)
    if mirror is None:
        return shown_path(folder)
    return f"{mirror.url_of(name)} (local copy: {shown_path(folder)})"
