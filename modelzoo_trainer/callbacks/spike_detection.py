"""Detection of loss spikes: end the run and skip their batches in the next one."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Count,
    NonNegativeFloat,
    NonNegativeInt,
    checked_dataclass,
)
from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.callbacks.skip_samples import file_at, read_batches, write_batches
from modelzoo_trainer.callbacks.step_guard import Batches, StepLosses, named
from modelzoo_trainer.errors import ConfigError, TrainingSpike

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.spike_detection")

Mode = Literal["min", "max"]


@checked_dataclass
class SpikeDetection(StepLosses):
    """Raise an error when the loss of a step spikes, and skip its batches in the next run.

    A loss is a spike if it is worse than the previous step's, and its distance from the mean
    of the last `window` good losses is at least `atol` and at least `rtol` times that mean. The
    loss is the mean over the batches of the step and over all processes, so all of them end.

    The batches of the step and of the previous one, which may have damaged the weights, are added
    to a file, as pairs of an epoch and a batch, both counted from 0. The next run skips the batches
    in it; delete the file to train on them. Nothing waits for the device: a spike may be reported
    some steps later. To continue without a restart, use `CheckLoss` with the policy `rollback`;
    together with that or `skip`, set `finite_only` to false, else a non-finite loss still ends the
    run.

    Args:
        mode: Whether smaller ("min") or larger ("max") losses are better.
        window: Number of losses in the mean, > 0.
        warmup: Number of steps at the beginning that are never spikes, >= 0.
        atol: Minimum distance of a spike from the mean, >= 0; None = any.
        rtol: Minimum distance as a multiple of the mean, >= 0; None = any.
        exclude_batches_path: The file if its name ends with .json, else its folder. None =
            `skip_batches.json` in `model_dir`.
        finite_only: Whether NaN and infinity are spikes, also during warmup. If false, NaN is not,
            and the default `CheckLoss` ends the run. Neither is ever included in the mean.

    State: The losses of the mean, the last one, the number of steps, and the batches of the last.

    Raises:
        ConfigError: If an argument is invalid; at the start of a fit, if the file cannot be read.
        TrainingSpike: During the run, with the step and the batches.

    Cost: See `StepLosses`; one deferred read of a number per step.
    """

    mode: Mode = "min"
    window: Count = 10
    warmup: NonNegativeInt = 1
    atol: NonNegativeFloat | None = None
    rtol: NonNegativeFloat | None = 2.0
    exclude_batches_path: Annotated[Path, "a path"] | None = None
    finite_only: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        self._loss: Tensor | None = None
        self._reset()

    @property
    def handles_bad_losses(self) -> bool:  # type: ignore[override]  # an argument decides
        """Whether the callback replaces the default `CheckLoss`."""
        return self.finite_only

    def _reset(self) -> None:
        self._good: deque[float] = deque(maxlen=self.window)
        self._last: float | None = None
        self._num_steps = 0
        self._previous: Batches = []
        self._open: dict[str, Any] | None = None
        self._has_raised = False

    # ---- findings of previous runs

    def _file(self, trainer: Trainer) -> Path:
        return file_at(Path(self.exclude_batches_path or trainer.model_dir))

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self.drop_batches()
        self._has_raised = False
        backend = trainer.backend
        num_shards = backend.comm.data_shard[1]
        found = self._read(trainer) if backend.comm.is_main else None
        batches, num_before = backend.comm.broadcast_object(found)
        here = (trainer.data.epoch, trainer.data.batch_idx)
        ahead = [place for place in batches if place >= here]
        if ahead and num_before != num_shards:
            log.warning(
                "%s lists batches to skip, but from a run with %d data-parallel processes; this "
                "run has %d, so the indices refer to other data and no batch is skipped. To skip "
                "them, use the same number of processes as before.",
                self._file(trainer),
                num_before,
                num_shards,
            )
        elif ahead:
            trainer.data.skip_batches(ahead)

    def _read(self, trainer: Trainer) -> tuple[Batches, int]:
        return read_batches(self._file(trainer), trainer.backend.comm.data_shard[1])

    # ---- step loss

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if self._open is not None:
            self.load_open_batches(self._open, trainer.backend.device)
            self._open = None
        super().on_train_batch_start(trainer, model, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self.drop_batches()  # of a step interrupted by a stop

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        self._loss = self.mean_loss(trainer)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        loss, self._loss = self._loss, None
        assert loss is not None  # created before the step
        batches = self._batches
        self.drop_batches()
        trainer.read((loss,), partial(self._judge, trainer, batches))

    # ---- findings

    def _judge(self, trainer: Trainer, batches: Batches, values: list[Any]) -> None:
        loss = float(values[0])
        if self._has_raised:
            return
        if self._is_spike(loss):
            self._has_raised = True
            self._end(trainer, loss, [*self._previous, *batches])
        self._num_steps += 1
        self._previous = batches
        if math.isfinite(loss):
            self._good.append(loss)
            self._last = loss

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss) and (self.finite_only or math.isnan(loss)):
            return self.finite_only
        if self._num_steps < self.warmup or self._last is None or not self._is_worse(loss):
            return False
        mean = math.fsum(self._good) / len(self._good)
        distance = abs(loss - mean)
        is_far = self.atol is None or distance >= self.atol
        return is_far and (self.rtol is None or distance >= abs(self.rtol * mean))

    def _is_worse(self, loss: float) -> bool:
        assert self._last is not None  # checked before
        return loss > self._last if self.mode == "min" else loss < self._last

    def _end(self, trainer: Trainer, loss: float, batches: Batches) -> None:
        """End the run.

        Raises:
            TrainingSpike: Always.
        """
        step, path = trainer.global_step, self._file(trainer)
        usual = ""
        if self._good:
            mean = math.fsum(self._good) / len(self._good)
            usual = f"; the mean of the last {len(self._good)} is {mean:.6g}"
        spike = TrainingSpike(
            f"loss is {loss:.6g} at global_step {step}, a spike{usual}. Batches to skip: "
            f"{named(batches)}.",
            step=step,
            batches=batches,
        )
        if trainer.backend.comm.is_main:
            try:
                self._write(trainer, path, batches)
            except (OSError, ConfigError) as error:
                spike.add_note(
                    f"The batches to skip could not be saved, so the next run will not skip them: "
                    f"{error}"
                )
            else:
                spike.add_note(f"the next run skips the batches in {str(path)!r}")
        raise spike

    def _write(self, trainer: Trainer, path: Path, batches: Batches) -> None:
        num_shards = trainer.backend.comm.data_shard[1]
        before, num_before = read_batches(path, num_shards)
        if num_before != num_shards:
            before = []
        write_batches(path, sorted({*before, *batches}), num_shards)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that affects later steps."""
        return {
            "good": list(self._good),
            "last": self._last,
            "num_steps": self._num_steps,
            "previous": [list(place) for place in self._previous],
            "open": self.open_batches() if self._batches else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._reset()
        self._good.extend(state_dict["good"])
        self._last = state_dict["last"]
        self._num_steps = state_dict["num_steps"]
        self._previous = [(epoch, batch_idx) for epoch, batch_idx in state_dict["previous"]]
        self.drop_batches()
        self._open = state_dict["open"]
