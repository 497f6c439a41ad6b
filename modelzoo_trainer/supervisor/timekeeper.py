"""What a supervised run spends its time on, step by step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs, StateDict
from modelzoo_trainer.checkpointing import read_manifest
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.supervisor.shared_status import NONE, Field, Kind, Page

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_NUM_KEPT: Final = 101


class Timekeeper(Callback):
    """Writes into the page where the run is, and what each second went to.

    Every instant belongs to one kind, and what ends one begins the next, so the seconds add up to
    the life of the process. It has to be called last of all callbacks. On a device that works
    behind the host's back, a step lasts as long as the host is held up by it.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._values = page.values
        self._durations: deque[float] = deque(maxlen=_NUM_KEPT)
        self._is_first = True
        self._is_whole = True
        self._before = Kind.OTHER
        self._spent_at: dict[int, float] = {}

    def note_median(self) -> None:
        """Write how long a batch takes, the first one left out; from any thread."""
        durations = list(self._durations)
        if durations:
            self._values[Field.MEDIAN_S] = statistics.median(durations)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._is_first = True
        self._durations.clear()
        self._spent_at.clear()
        self._values[Field.START_STEP] = self._values[Field.STEP] = trainer.global_step
        self._values[Field.SPENT_AT_START] = self._page.spent(Kind.STEPS)
        if self._values[Field.BEGAN] == NONE:
            self._values[Field.BEGAN] = time.monotonic()

    @override
    def on_train_start(
        self, trainer: Trainer, model: Module, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        self._page.switch(Kind.DATA)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        self._page.switch(Kind.FIRST_STEP if self._is_first else Kind.STEPS)
        self._is_whole = not self._is_first

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not trainer.grad_accum.should_run_optimizer_step:
            self._end_batch()

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._end_batch()
        self._values[Field.STEP] = trainer.global_step

    def _end_batch(self) -> None:
        elapsed = self._page.switch(Kind.DATA)
        if self._is_whole:
            self._durations.append(elapsed)
        self._is_first = False

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._page.switch(Kind.OTHER)
        self.note_median()

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        self._page.switch(Kind.VALIDATION)
        stack.callback(self._page.switch, Kind.OTHER)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        before = Kind(int(self._values[Field.KIND]))
        self._page.switch(Kind.VALIDATION)
        stack.callback(self._page.switch, Kind.OTHER if before is Kind.STARTUP else before)

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        kind = Kind(int(self._values[Field.KIND]))
        self._before = Kind.OTHER if kind is Kind.STARTUP else kind
        self._page.switch(Kind.SAVING)
        self._is_whole = False
        self.note_median()
        self._spent_at[trainer.global_step] = self._page.spent(Kind.STEPS)

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self._values[Field.KIND] == Kind.SAVING:
            self._page.switch(self._before)

    def note_commit(self, path: Path) -> None:
        """Write down that a checkpoint has been committed."""
        try:
            step = read_manifest(path).step
        except CheckpointError:  # somebody has taken it away
            return
        spent = self._spent_at.get(step)
        self._spent_at = {one: s for one, s in self._spent_at.items() if one > step}
        if spent is not None:
            self._values[Field.SPENT_AT_SAVE] = spent
        self._values[Field.SAVED_STEP] = step
