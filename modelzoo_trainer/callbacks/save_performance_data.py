"""The measurements of the profilers in a file."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.callbacks.profiler import Profiler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.performance")

_NAME: Final = "performance.json"


class SavePerformanceData(Callback):
    """Write the `perf_metrics` of all profilers to `performance.json` in the run folder.

    The file is rewritten at the end of each train stage and validation, except after an exception.
    It has a mapping for each profiler, by its name among the callbacks; non-finite values are null.
    If it cannot be written, one warning is logged.
    """

    def __init__(self) -> None:
        self._has_failed = False

    @override
    def post_setup(self, trainer: Trainer) -> None:
        if not _profilers(trainer):
            log.warning(
                "SavePerformanceData: %s stays empty without a profiler. Add the callback "
                "RateProfiler.",
                _NAME,
            )

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._write(trainer)

    @override
    def on_validate_end(self, trainer: Trainer, model: Module, loop: Any) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not trainer.backend.comm.is_main:
            return
        path = trainer.artifact_dir / _NAME
        text = json.dumps(_measured(trainer), indent=1, default=str)
        fresh = path.with_name(f".{_NAME}")
        try:
            fresh.write_text(f"{text}\n", encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            if not self._has_failed:
                log.warning("Cannot write %s: %s.", path, error.strerror or error)
            self._has_failed = True


def _profilers(trainer: Trainer) -> list[Profiler]:
    return trainer.get_callbacks(Profiler)  # type: ignore[type-abstract]  # a filter


def _measured(trainer: Trainer) -> dict[str, Any]:
    """Return the measurements of each profiler by name; a second one of a class has a number."""
    found: dict[str, Any] = {}
    for profiler in _profilers(trainer):
        name, number = type(profiler).__name__, 1
        while name in found:
            number += 1
            name = f"{type(profiler).__name__}_{number}"
        found[name] = {key: _plain(value) for key, value in profiler.perf_metrics.items()}
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
