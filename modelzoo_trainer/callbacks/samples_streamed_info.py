"""Number of samples trained on, and how to skip those that caused a failure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import Batch, Callback, Loader, StateDict
from modelzoo_trainer.errors import CheckpointError, TrainingSpike
from modelzoo_trainer.loading.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.samples_streamed")


class SamplesStreamedInfo(Callback):
    """Count the training samples, and log the count when a bad loss ends the run.

    When an exception about a non-finite loss or gradient, or a `TrainingSpike`, leaves a fit, it
    logs how many samples were trained on, how many of them since the newest checkpoint, and the
    `SkipSamples` with which a resumed run skips them. Samples are counted over all processes,
    assuming that each has as many as the main process.

    State: The number of samples.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        """Samples of all processes since the beginning of the run."""
        self._at_step: dict[int, int] = {}
        self._num_saved = 0
        self._boundary = (0, 0)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._note_boundary(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if not trainer.is_padding:
            self.num_samples += batch_size_of(batch) * trainer.backend.comm.data_shard[1]

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._note_boundary(trainer)

    def _note_boundary(self, trainer: Trainer) -> None:
        self._boundary = (trainer.data.num_batches, self.num_samples)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        num_batches, num_samples = self._boundary
        if trainer.data.num_batches == num_batches:  # else a step was interrupted
            self.num_samples = num_samples

    # ---- at the newest checkpoint

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._at_step[trainer.global_step] = self.num_samples

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        try:
            step = checkpointing.read_manifest(ckpt_path).step
        except CheckpointError:  # already deleted, by KeepNCheckpoints for example
            return
        self._num_saved = self._at_step.get(step, self._num_saved)
        self._at_step = {at: num for at, num in self._at_step.items() if at > step}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"num_samples": self.num_samples}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number of samples."""
        self.num_samples = self._num_saved = state_dict["num_samples"]
        self._at_step = {}

    # ---- at the end of the run

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        if not isinstance(exception, (FloatingPointError, TrainingSpike)):
            return
        log.error(
            "Failed at step %d after %d samples, %d of them since the newest checkpoint. To resume "
            "after these, add the callback SkipSamples(n=%d).",
            trainer.global_step,
            self.num_samples,
            self.num_samples - self._num_saved,
            self.num_samples - self._num_saved,
        )
