"""Training that goes on behind some of its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.core.loop import require_count

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.skip_samples")


class SkipSamples(Callback):
    """Leaves out the next samples of the training data, once, where a run begins or resumes.

    They are left out in whole batches of all processes; a number that ends within one leaves out
    the rest of it, too. Steps and schedules do not count them. A run that resumes from a checkpoint
    that was made after them does not leave out as many again; one with another `n` does, from
    where its checkpoint was made. `SamplesStreamedInfo` says which `n` goes past a failure.

    Args:
        n: Samples of all processes, > 0.

    State: Which `n` has been left out.

    Raises:
        ConfigError: If `n` does not fit; at the start of a fit, if the dataloader does not tell how
            many samples a batch has.

    Cost: None where the data can begin anywhere, as with a torch DataLoader over samples with
        indices; else they are loaded and dropped.
    """

    def __init__(self, n: int) -> None:
        require_count("SkipSamples.n", n)
        self.n = n
        self._is_done = False
        self._was_done = False

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._was_done, self._is_done = self._is_done, False

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "dataloader" not in state_dict:  # weights alone: the position is as it was
            self._is_done = self._was_done
        elif trainer.is_resuming:
            self._skip(trainer)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._skip(trainer)

    def _skip(self, trainer: Trainer) -> None:
        if self._is_done:
            return
        self._is_done = True
        data = trainer.data
        before = (data.epoch, data.batch_idx)
        num = data.skip_samples(self.n)
        log.info(
            "Left out %d samples: from batch %d of pass %d on, to batch %d of pass %d.",
            num,
            before[1],
            before[0],
            data.batch_idx,
            data.epoch,
        )
        if data.epoch >= trainer.schedule.end_epoch:
            log.warning("SkipSamples: nothing is left to train on; the loop ends before.")

    def state_dict(self) -> dict[str, Any]:
        """Return which number of samples has been left out."""
        return {"n": self.n if self._is_done else 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Note whether that was as many as now."""
        self._is_done = state_dict["n"] == self.n
