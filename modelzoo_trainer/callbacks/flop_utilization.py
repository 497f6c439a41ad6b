"""Model FLOPs utilization (MFU) of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import FinitePositiveFloat, checked
from modelzoo_trainer.base.devices import attention_formulas, device_name, map_tensors, peak_flops
from modelzoo_trainer.callback import Batch, Loader, Outputs
from modelzoo_trainer.callbacks.profiler import TrainingProfiler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class FlopCount:
    """Count the floating-point operations of everything that runs, until `stop`.

    Counted are matrix products, convolutions and attention, by `torch.utils.flop_counter`. Compiled
    code runs eagerly meanwhile: the counter does not see into graphs, and a function that torch
    first traces under a counter would never be compiled.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # has all it calls
        self._counter = self._stack.enter_context(counter)
        self._num_subtracted = 0
        _OPEN.append(self)
        self._stack.callback(_OPEN.remove, self)

    @property
    def total(self) -> int:
        """The number of operations so far."""
        return int(self._counter.get_total_flops()) - self._num_subtracted

    def subtract(self, num: int) -> None:
        """Subtract operations that should not count."""
        self._num_subtracted += num

    def stop(self) -> None:
        """Stop counting. Idempotent."""
        self._stack.close()


_OPEN: Final[list[FlopCount]] = []


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the operations inside, which measure the model."""
    before = [(count, count.total) for count in _OPEN]
    try:
        yield
    finally:
        for count, total in before:
            count.subtract(count.total - total)


class _NoModules:
    """Replacement for torch's module tracker, which hooks all modules of the process.

    Compiled models warn about these hooks, and counts per module are not needed.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


log = logging.getLogger("modelzoo_trainer.performance")


class FlopUtilization(TrainingProfiler):
    """Log FLOP/s and model FLOPs utilization (MFU).

    The floating-point operations of the forward and backward pass are counted by
    `torch.utils.flop_counter`: matrix products, convolutions and attention. They are counted once
    per batch shape, in the first step with it; other steps are not affected. Recomputation by
    activation checkpointing is counted. In a mixture of experts, the work of the experts that each
    token is routed to is counted. Each process counts its own device; the main process logs its
    values. Validations, checkpoints and the first step are excluded.

    The default peak rate is the vendor's for dense matrices in the dtype of the computation. If it
    is unknown, a message is logged once, and only `flops_per_sec` is logged.

    Args:
        peak_flops: Peak rate of one device in FLOP/s, > 0; None = the vendor's.

    Metrics:
        flops_per_sec: FLOP/s of a device since the last log step.
        flops_utilization: flops_per_sec in percent of the peak rate.

    State: The counts by batch shape, as a counted step runs eagerly.

    Cost: Reading the shapes of each batch.

    Raises:
        ConfigError: If the rate is not positive.
    """

    @checked()
    def __init__(self, peak_flops: FinitePositiveFloat | None = None) -> None:
        self.peak_flops = peak_flops
        self._peak: float | None = None
        self._has_logged = False
        self._counts: dict[str, int] = {}
        self._num_params = 0
        self._counting: FlopCount | None = None
        self._counted = 0
        self._key = ""
        super().__init__()

    @override
    def reset(self) -> None:
        super().reset()
        self._num_flops = 0

    @property
    @override
    def perf_metrics(self) -> dict[str, Any]:
        """Measurements of one device since the fit began, without the first step.

        `total_flops`; `flops_per_sec`; and, both null if the peak is unknown, `peak_flops` and
        `flops_utilization` in percent.
        """
        elapsed = self._clock.elapsed()
        rate = self._num_flops / elapsed if elapsed else 0.0
        return {
            "total_flops": self._num_flops,
            "flops_per_sec": rate,
            "peak_flops": self._peak,
            "flops_utilization": None if self._peak is None else 100 * rate / self._peak,
        }

    # ---- counting

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        super().on_enter_fit(trainer, stack, train_dataloader, val_dataloader, loop)
        stack.callback(self._stop_counting)

    @override
    def on_train_start(
        self, trainer: Trainer, model: Module, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        super().on_train_start(trainer, model, train_dataloader, loop, loop_idx)
        num = sum(param.numel() for param in model.parameters() if param.requires_grad)
        if num != self._num_params:  # another model or other trainable parameters
            self._counts.clear()
            self._num_params = num
        self._peak = self.peak_flops
        if self._peak is None:
            self._peak = peak_flops(trainer.backend, _dtype_of(trainer, model))
        if self._peak is None and not self._has_logged and trainer.backend.comm.is_main:
            self._has_logged = True
            log.info(
                "FlopUtilization: the peak FLOP/s of %r for %s is unknown, so no utilization is "
                "logged. Set FlopUtilization.peak_flops.",
                device_name(trainer.backend),
                str(_dtype_of(trainer, model)).removeprefix("torch."),
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, model, batch, batch_idx)
        self._stop_counting()  # of an interrupted step
        self._counted = 0
        self._key = _shapes_of(batch)
        if self._key not in self._counts:
            self._counting = FlopCount()

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        if self._counting is not None:
            self._counted = self._counting.total

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self._counting is not None:
            self._stop_counting()
            self._counts[self._key] = self._counted
        if not self.counts(trainer):
            return
        self._num_flops += self._counts[self._key]
        if trainer.should_run_optimizer_step and trainer.is_log_step:
            self._log(trainer)

    def _stop_counting(self) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.stop()

    def _log(self, trainer: Trainer) -> None:
        rate = self.rate_since(self._num_flops, self._clock.elapsed())
        if rate is None:
            return
        metrics = {"flops_per_sec": rate}
        if self._peak is not None:
            metrics["flops_utilization"] = 100 * rate / self._peak
        trainer.log_metrics_dict(metrics)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the number of parameters that they are valid for."""
        return {"num_params": self._num_params, "counts": dict(self._counts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._num_params = state_dict["num_params"]
        self._counts = dict(state_dict["counts"])


def _shapes_of(batch: Batch) -> str:
    shapes: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append("x".join(map(str, tensor.shape)))
        return tensor

    map_tensors(batch, note)
    return ",".join(shapes)


def _dtype_of(trainer: Trainer, model: Module) -> torch.dtype:
    """Return the dtype of matrix products: autocast's, or else the weights'."""
    half = getattr(trainer.precision.autocast, "fast_dtype", None)
    if isinstance(half, torch.dtype):
        return half
    weights = [param for param in model.parameters() if param.dim() > 1]
    return max(weights, key=Tensor.numel).dtype if weights else torch.get_default_dtype()
