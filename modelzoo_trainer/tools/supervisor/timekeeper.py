"""Measure where the time of a supervised run goes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import Callback, StateDict
from modelzoo_trainer.checkpointing import read_manifest
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.tools.supervisor.protocol import UNKNOWN, SharedStatus, TimeKind

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_NUM_KEPT: Final = 101


class Timekeeper(Callback):
    """Write the progress of the run and the time by kind into the shared status.

    Kinds do not overlap and leave no gap, so the seconds add up to the life of the process. Must
    be called after all other callbacks. On an asynchronous device, a step lasts as long as it
    blocks the host.
    """

    def __init__(self, shared: SharedStatus) -> None:
        self._shared = shared
        self._durations: deque[float] = deque(maxlen=_NUM_KEPT)
        self._is_first = True
        self._is_whole = True
        self._before = TimeKind.OTHER
        self._spent_at: dict[int, float] = {}

    def note_median(self) -> None:
        """Write the median duration of a batch, without the first one. Thread-safe."""
        durations = list(self._durations)
        if durations:
            self._shared.median_s = statistics.median(durations)

    @override
    def on_fit_start(self, trainer: Trainer, *args: Any) -> None:
        shared = self._shared
        self._is_first = True
        self._durations.clear()
        self._spent_at.clear()
        shared.start_step = shared.step = trainer.global_step
        shared.spent_at_start = shared.seconds[TimeKind.STEPS]
        if shared.began == UNKNOWN:
            shared.began = time.monotonic()

    @override
    def on_train_start(self, *args: Any) -> None:
        self._shared.switch(TimeKind.DATA)

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self._shared.switch(TimeKind.FIRST_STEP if self._is_first else TimeKind.STEPS)
        self._is_whole = not self._is_first

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.grad_accum.should_run_optimizer_step:
            self._end_batch()

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._end_batch()
        self._shared.step = trainer.global_step

    def _end_batch(self) -> None:
        elapsed = self._shared.switch(TimeKind.DATA)
        if self._is_whole:
            self._durations.append(elapsed)
        self._is_first = False

    @override
    def on_train_end(self, *args: Any) -> None:
        self._shared.switch(TimeKind.OTHER)
        self.note_median()

    @override
    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, *args: Any) -> None:
        self._shared.switch(TimeKind.VALIDATION)
        stack.callback(self._shared.switch, TimeKind.OTHER)

    @override
    def on_enter_validate(self, trainer: Trainer, stack: ExitStack, *args: Any) -> None:
        stack.callback(self._shared.switch, self._after_interruption())
        self._shared.switch(TimeKind.VALIDATION)

    def _after_interruption(self) -> TimeKind:
        """Return the kind to continue with after a validation or a save that starts now."""
        kind = TimeKind(int(self._shared.kind))
        return TimeKind.OTHER if kind is TimeKind.STARTUP else kind

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._before = self._after_interruption()
        self._shared.switch(TimeKind.SAVING)
        self._is_whole = False
        self.note_median()
        self._spent_at[trainer.global_step] = self._shared.seconds[TimeKind.STEPS]

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._shared.kind == TimeKind.SAVING:
            self._shared.switch(self._before)

    def note_commit(self, path: Path) -> None:
        """Write the step of a committed checkpoint."""
        try:
            step = read_manifest(path).step
        except CheckpointError:  # deleted in the meantime
            return
        spent = self._spent_at.get(step)
        self._spent_at = {one: s for one, s in self._spent_at.items() if one > step}
        if spent is not None:
            self._shared.spent_at_save = spent
        self._shared.saved_step = step
