"""Run a file in the workers of Ray Train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.exit_codes import DONE, PREEMPTED
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.errors import ConfigError, suggest

_OPTIONS: Final = {option.name: option for option in OPTIONS}
_ON_PURPOSE: Final = ("stop file", "max_time")


class WorkerStopped(RuntimeError):
    """A worker's run did not end by itself; Ray may start the workers again, and they resume."""


def worker(
    params: str | Path,
    *arguments: str,
    set: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Mapping[str, Any]], int]:
    """Return a function for Ray Train that does what `modelzoo-trainer fit params.yaml` does.

    For `TorchTrainer(worker("params.yaml", max_steps=1000), scaling_config=...)`. The file is
    checked here; it is read again by each worker, in the working directory of this process, so
    all nodes must see both, and `model_dir`.

    The function takes Ray's `train_loop_config`, whose keys are the keys of `options`, or paths as
    in `set`. It returns 0 when the run is finished, and 143 when a stop file or `max_time` has
    stopped it: both end `TorchTrainer.fit`, and the value is `Result.return_value` of Ray. In all
    other cases it raises, so that Ray starts the workers again, as often as
    `FailureConfig(max_failures=...)` says; they resume from the newest checkpoint. Metrics and
    checkpoints are reported as by the callback `RayTrainReport`.

    Args:
        params: The YAML file.
        arguments: Further words of the command line, such as `"--import", "my_models"`.
        set: Settings by path, such as `{"init.seed": 7}`.
        options: Options of the command line, such as `device`, `model_dir`, `max_steps`.

    Raises:
        ConfigError: If the file, an option or a setting is invalid.
    """
    words = [str(Path(params).absolute()), *arguments, *_words(set or {}, options)]
    folder = Path.cwd()
    _check(words)

    def train_loop_per_worker(config: Mapping[str, Any]) -> int:
        given = {name: value for name, value in config.items() if name in _OPTIONS}
        paths = {name: value for name, value in config.items() if name not in _OPTIONS}
        return _run([*words, *_words(paths, given)], folder)

    return train_loop_per_worker


def _words(settings: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return settings and options as words of the command line; None leaves an option out."""
    words = []
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"worker: unknown option {name!r}. {suggest(name, _OPTIONS)}")
        if _OPTIONS[name].metavar is None:
            words += [f"--{name}"] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")
    for path, value in settings.items():
        words += ["--set", f"{path}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def _check(words: list[str]) -> None:
    """Raise a `ConfigError` if a command line is invalid."""
    from modelzoo_trainer.cli.parser import parse_run
    from modelzoo_trainer.cli.plans import check_run

    check_run(parse_run(["fit", *words]))


def _run(words: list[str], folder: Path) -> int:
    """Run a command line in a worker.

    Raises:
        WorkerStopped: If the run neither is finished nor was stopped on purpose.
    """
    from modelzoo_trainer.callbacks import RayTrainReport
    from modelzoo_trainer.cli.command import main

    os.chdir(folder)
    with RayTrainReport() as report:  # of every trainer in the file
        code = main(["fit", *words])
    if code == DONE or (code == PREEMPTED and report.stopped_by in _ON_PURPOSE):
        return code
    if report.error is not None:
        why = f"{type(report.error).__name__}: {report.error}"
    else:
        why = f"stopped by {report.stopped_by}" if report.stopped_by else "its output says why"
    raise WorkerStopped(f"the run ended with exit code {code} ({why})") from report.error
