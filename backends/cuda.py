"""NVIDIA GPUs, and AMD GPUs under ROCm, which torch also calls "cuda"."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from typing_extensions import override

from .accelerator import AcceleratorBackend
from .errors import BackendError, check_choice

if TYPE_CHECKING:
    from .compile_watch import CompileWatch

Guard = Literal["off", "warn", "error"]

_GUARDS: Final = ("off", "warn", "error")
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
# The two values with which cuBLAS is deterministic:
# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_FLOAT8: Final = (8, 9)  # Ada and Hopper
_REPRODUCIBLE: Final = (":4096:8", ":16:8")


class CudaBackend(AcceleratorBackend):
    """CUDA and ROCm.

    Args:
        guard: What to do when a step waits for the device: "off", "warn" or "error". torch detects
            most host reads, but no collectives. A step that compiles, and the one after it, may
            wait: kernels are tuned there.
        **options: Options of `AcceleratorBackend`, without `kind`.

    Raises:
        BackendError: If `guard` is invalid; in `open`, if it is too late for `deterministic`,
            because cuBLAS has started.
        BackendUnavailable: In `open`, if the device does not exist.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, *, guard: Guard = "warn", **options: Any) -> None:
        check_choice("guard", guard, _GUARDS)
        self.guard = guard
        self._guard_level = _GUARDS.index(guard)
        self._level_before: int | None = None
        self._compiles: CompileWatch | None = None
        self._num_compiled = -1  # compilations before the last step; the first step may wait
        super().__init__(kind="cuda", **options)

    @staticmethod
    @override
    def is_available(kind: str | None = None) -> bool:
        """Return whether torch finds a CUDA or ROCm device."""
        return kind in (None, "cuda") and torch.cuda.is_available()

    @override
    def _before_start(self) -> None:
        super()._before_start()
        if self._deterministic:
            _make_cublas_reproducible()

    @override
    def open(self) -> None:
        super().open()
        has_float8 = torch.version.hip is None and torch.cuda.get_device_capability() >= _FLOAT8
        if has_float8:
            self.caps = dataclasses.replace(self.caps, no_float8="")
        if self._deterministic:
            before = torch.backends.cudnn.benchmark
            self._undo.append(lambda: setattr(torch.backends.cudnn, "benchmark", before))
            torch.backends.cudnn.benchmark = False
        if self._guard_level:
            with warnings.catch_warnings():  # torch warns that this is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode(torch.cuda.get_sync_debug_mode())

    @override
    def close(self, *, ok: bool = True) -> None:
        self._disarm()
        if self._compiles is not None:
            self._compiles.close()
            self._compiles = None
        super().close(ok=ok)

    @override
    def _enter_step(self, seed: int) -> None:
        super()._enter_step(seed)
        if self._guard_level and self._level_before is None and self._is_tuned():
            self._level_before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode(self._guard_level)

    def _is_tuned(self) -> bool:
        """Return whether the step before has compiled nothing."""
        if self._compiles is None:
            from .compile_watch import CompileWatch  # imports torch._dynamo

            self._compiles = CompileWatch(self._disarm)
        before, self._num_compiled = self._num_compiled, self._compiles.num_started
        return before == self._num_compiled or (before < 0 and self._compile is None)

    @override
    def _exit_step(self, *, ok: bool) -> None:
        self._disarm()
        super()._exit_step(ok=ok)

    @override
    def _look(self, flag: Tensor) -> bool:
        level = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(0)  # this read is intended
        try:
            return super()._look(flag)
        finally:
            torch.cuda.set_sync_debug_mode(level)

    def _disarm(self) -> None:
        if self._level_before is not None:
            torch.cuda.set_sync_debug_mode(self._level_before)
            self._level_before = None


def _make_cublas_reproducible() -> None:
    """Set cuBLAS's workspace before CUDA starts; not undone, as cuBLAS reads it once."""
    given = os.environ.get(_WORKSPACE)
    if torch.version.hip is not None or given in _REPRODUCIBLE:
        return
    has_started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    if given is not None or has_started:
        state = f"is {given!r}" if given is not None else "is not set and CUDA has started"
        raise BackendError(
            f"backend.deterministic is true, but the environment variable {_WORKSPACE} {state}. "
            f"Start the program with {_WORKSPACE}={_REPRODUCIBLE[0]}."
        )
    os.environ[_WORKSPACE] = _REPRODUCIBLE[0]
