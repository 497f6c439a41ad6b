"""A device for tests: the CPU with the restrictions of an accelerator."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from .accelerator import AsynchronousBackend
from .norms import Norms
from .placement import map_tensors
from .sync_guard import SyncGuard

_DEVICE: Final = torch.device("cpu")


class FakeBackend(AsynchronousBackend):
    """The CPU with the restrictions of a device, for tests of models, callbacks and the trainer.

    Numbers are the CPU's, but access to them is restricted:

    * a read inside the step (`loss.item()`, `if loss > 1`, `print(loss)`, `x[mask]`, ...) raises
      `HostReadError` with the line of the read; see `SyncGuard` for what it cannot detect;
    * `read` takes a snapshot; all reads of a step share one transfer and are delivered `lag` steps
      later, or at a `flush`;
    * batches are copies, and one more is fetched from the loader than was used;
    * float16 needs a loss scaler.

    `counters()`: number of refused reads (`host_reads`), of deferred ones (`reads`), and of
    transfers for these (`transfers`: one per step and dtype).

    Args:
        **options: Options of `AsynchronousBackend`.

    Example:
        >>> backend = FakeBackend()
        >>> loss = torch.tensor(0.5)
        >>> with backend.step(0):
        ...     backend.read([loss], print)
        >>> backend.flush()
        [0.5]
    """

    name = "fake"

    def __init__(self, **options: Any) -> None:
        self._guard = SyncGuard()
        super().__init__(**options)

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @property
    @override
    def device(self) -> torch.device:
        """The CPU."""
        return _DEVICE

    # ---- model, data

    @override
    def prepare_model(self, model: Module) -> Module:
        prepared = super().prepare_model(model)
        for module in model.modules():
            compiled = module._compiled_call_impl
            if compiled is not None:  # the compiler would trace the guard
                module._compiled_call_impl = self._guard.outside(compiled)
        return prepared

    @override
    def to_device(self, batch: Any) -> Any:
        return map_tensors(batch, torch.clone)

    # ---- the step

    @override
    def _enter_step(self, seed: int) -> None:
        super()._enter_step(seed)
        self._guard.arm()

    @override
    def _exit_step(self, *, ok: bool) -> None:
        self._guard.disarm()
        super()._exit_step(ok=ok)

    @override
    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler | None:
        return _PausingScaler(self._guard, **options)

    @override
    def _make_norms(self) -> Norms:
        return Norms(self, self._guard.paused)

    @override
    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        with self._guard.paused():
            super().optimizer_step(optimizer, keep)

    @override
    def counters(self) -> dict[str, int]:
        return {"host_reads": self._guard.num_refused, **super().counters()}


class _PausingScaler(torch.amp.GradScaler):
    """A loss scaler that may read, as torch's does for optimizers that are not fused."""

    def __init__(self, guard: SyncGuard, **options: Any) -> None:
        super().__init__("cpu", **options)
        self._guard = guard

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        with self._guard.paused():
            super().unscale_(optimizer)

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        with self._guard.paused():
            return super().step(optimizer, *args, **kwargs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        with self._guard.paused():
            super().update(new_scale)
