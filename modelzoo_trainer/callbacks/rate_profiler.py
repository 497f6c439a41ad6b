"""How fast training goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.profiler import TrainingProfiler
from modelzoo_trainer.data.batches import batch_size_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class RateProfiler(TrainingProfiler):
    """Logs how fast a run trains, on log steps: samples of all processes, counted on the first.

    `local_samples_per_sec` is the rate since the last log step; `avg_samples_per_sec` and
    `avg_steps_per_sec` are those since the fit began. The clock starts at the end of the first
    step, which is not counted, and stands still during validations and checkpoints.

    Metrics:
        local_samples_per_sec: Samples a second of all processes, since the last log step.
        avg_samples_per_sec: Likewise, since the fit began.
        avg_steps_per_sec: Steps a second since the fit began.
    """

    @override
    def reset(self) -> None:
        super().reset()
        self._num_samples = 0
        self._num_steps = 0
        self._local_rate = 0.0

    @property
    @override
    def perf_metrics(self) -> dict[str, float]:
        """What was measured since the fit began.

        `total_samples`, `total_steps` and `total_time` (in seconds) without the first step;
        `rate`, since the last log step; `global_rate` and `samples_per_sec`, over all.
        """
        elapsed = self._clock.elapsed()
        rate = self._num_samples / elapsed if elapsed else 0.0
        return {
            "total_samples": self._num_samples,
            "total_steps": self._num_steps,
            "total_time": elapsed,
            "rate": self._local_rate,
            "global_rate": rate,
            "samples_per_sec": rate,
        }

    # ---- what is counted

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not self.counts(trainer):
            return
        self._num_samples += batch_size_of(batch) * trainer.backend.data_shard[1]
        if trainer.should_run_optimizer_step:
            self._num_steps += 1
            if trainer.is_log_step:
                self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        rate = self.rate_since(self._num_samples)
        if rate is None:
            return
        self._local_rate = rate
        elapsed = self._clock.elapsed()
        trainer.log_metrics_dict(
            {
                "local_samples_per_sec": self._local_rate,
                "avg_samples_per_sec": self._num_samples / elapsed,
                "avg_steps_per_sec": self._num_steps / elapsed,
            }
        )
