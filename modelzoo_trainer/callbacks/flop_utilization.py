"""How much of what the device can do a run makes use of."""

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

from modelzoo_trainer.callback import Batch, Loader, Outputs
from modelzoo_trainer.callbacks.profiler import TrainingProfiler
from modelzoo_trainer.constraints import FinitePositiveFloat, checked
from modelzoo_trainer.devices import device_name, map_tensors, peak_flops

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class FlopCount:
    """Counts the operations of everything that runs, from now until `stop`.

    They are those of matrix products, convolutions and attention, as `torch.utils.flop_counter`
    counts them. What is compiled runs uncompiled meanwhile: the counter sees into no graph, and a
    function that torch first met under a counter would never be compiled.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        counter = FlopCounterMode(display=False, custom_mapping=_attention_formulas())
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # what is asked of one
        self._counter = self._stack.enter_context(counter)
        self._num_left_out = 0
        _OPEN.append(self)
        self._stack.callback(_OPEN.remove, self)

    @property
    def total(self) -> int:
        """How many there were."""
        return int(self._counter.get_total_flops()) - self._num_left_out

    def leave_out(self, num: int) -> None:
        """Take back some that were counted."""
        self._num_left_out += num

    def stop(self) -> None:
        """Count no more."""
        self._stack.close()


_OPEN: Final[list[FlopCount]] = []


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the operations inside: they measure the model, they are not its."""
    before = [(count, count.total) for count in _OPEN]
    try:
        yield
    finally:
        for count, total in before:
            count.leave_out(count.total - total)


class _NoModules:
    """Stands for torch's tracker of modules, which puts hooks on all modules of the process.

    Of these a compiled model warns, and nobody asks for the counts of single modules.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


def _attention_formulas() -> dict[Any, Any]:
    """Return formulas for the kernels of attention that torch's counter does not know."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

    found = {}
    for kernel in ("flash_attention_for_cpu", "fused_attention_overrideable"):
        for end, formula in (("", forward), ("_backward", backward)):
            packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{end}", None)
            if packet is not None and packet not in flop_registry:
                found[packet] = formula
    return found


log = logging.getLogger("modelzoo_trainer.performance")


class FlopUtilization(TrainingProfiler):
    """Logs how many operations a second a device does, and how much of its peak that is (MFU).

    The floating-point operations of the forward and the backward pass are counted by
    `torch.utils.flop_counter`: those of matrix products, convolutions and attention. That is done
    once for each shape of batches, in the step of the first one; the other steps are not touched.
    What activation checkpointing computes twice counts twice. Each process counts its own device;
    the first one's figures are logged. Validations, checkpoints and the first step do not count.

    The peak rate is the maker's for dense matrices in the type that the model computes in. If it
    is not known, that is said once and only `flops_per_sec` is logged.

    Args:
        peak_flops: Operations a second that one device can do, > 0; None = as the device's maker
            says.

    Metrics:
        flops_per_sec: FLOP/s of a device since the last log step.
        flops_utilization: That in percent of the peak rate.

    State: The counts by shape, as a step that is counted runs uncompiled.

    Cost: A look at the shapes of each batch.

    Raises:
        ConfigError: If the rate is not positive.
    """

    @checked()
    def __init__(self, peak_flops: FinitePositiveFloat | None = None) -> None:
        self.peak_flops = peak_flops
        self._peak: float | None = None
        self._is_told = False
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
        """The fit without its first step, of one device.

        `total_flops`; `flops_per_sec`; and, both null if the peak is not known, `peak_flops` and
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

    # ---- what is counted

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
        if num != self._num_params:  # another model, or other parts of it are trained
            self._counts.clear()
            self._num_params = num
        self._peak = self.peak_flops
        if self._peak is None:
            self._peak = peak_flops(trainer.backend, _dtype_of(trainer, model))
        if self._peak is None and not self._is_told and trainer.backend.comm.is_main:
            self._is_told = True
            log.info(
                "FlopUtilization: the peak rate of %r in this type is not known, so no utilization "
                "is logged. Give it as peak_flops.",
                device_name(trainer.backend),
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, model, batch, batch_idx)
        self._stop_counting()  # of a step that was cut off
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
        rate = self.rate_since(self._num_flops)
        if rate is None:
            return
        metrics = {"flops_per_sec": rate}
        if self._peak is not None:
            metrics["flops_utilization"] = 100 * rate / self._peak
        trainer.log_metrics_dict(metrics)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and what of the model they are for."""
        return {"num_params": self._num_params, "counts": dict(self._counts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them."""
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
    """Return the type that matrix products are computed in: autocast's, else the weights'."""
    half = getattr(trainer.precision.autocast, "fast_dtype", None)
    if isinstance(half, torch.dtype):
        return half
    weights = [param for param in model.parameters() if param.dim() > 1]
    return max(weights, key=Tensor.numel).dtype if weights else torch.get_default_dtype()
