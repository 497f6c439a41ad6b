"""How many samples a run has taken, and how to get past those that broke it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import Batch, Callback, Loader, StateDict
from modelzoo_trainer.data.batches import batch_size_of
from modelzoo_trainer.errors import CheckpointError, TrainingSpike

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.samples_streamed")


class SamplesStreamedInfo(Callback):
    """Counts the samples that were trained on, and says so when the loss has ended a run.

    When an error about a loss or a gradient that is not finite, or a `TrainingSpike`, leaves a fit,
    it logs how many samples had been taken, how many of them after the newest checkpoint, and with
    which `SkipSamples` a run that resumes from there goes past them. Samples are those of all
    processes, as many on each as on the first.

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
        if trainer.data.num_batches == num_batches:  # a step that was cut off is given back
            self.num_samples = num_samples

    # ---- where the newest checkpoint was made

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._at_step[trainer.global_step] = self.num_samples

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        try:
            step = checkpointing.read_manifest(ckpt_path).step
        except CheckpointError:  # removed already, by who keeps few of them
            return
        self._num_saved = self._at_step.get(step, self._num_saved)
        self._at_step = {at: num for at, num in self._at_step.items() if at > step}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples."""
        return {"num_samples": self.num_samples}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.num_samples = self._num_saved = state_dict["num_samples"]
        self._at_step = {}

    # ---- when the run is over

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        if not isinstance(exception, (FloatingPointError, TrainingSpike)):
            return
        log.error(
            "%d samples had been taken, %d of them since the newest checkpoint, at step %d. To go "
            "on behind them, resume with the callback SkipSamples(n=%d).",
            self.num_samples,
            self.num_samples - self._num_saved,
            trainer.global_step,
            self.num_samples - self._num_saved,
        )
