"""Access to torch_xla: startup, transfers, counters."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import BackendError, BackendUnavailable
from .spmd import MeshShape, Spmd, start_spmd

log = logging.getLogger("modelzoo_trainer.backends.xla")

_INSTALL: Final = "pip install 'modelzoo-trainer[xla]'"
_CACHE_PATH: Final = "XLA_PERSISTENT_CACHE_PATH"
# Values of torch.set_float32_matmul_precision and their equivalents in torch_xla.
_PRECISIONS: Final = {"highest": "highest", "high": "high", "medium": "default"}


class XlaRuntime:
    """The runtime of this process, with one device, or several as one.

    Creating one imports torch_xla, which patches torch for the whole process.

    `kind`: required kind of device (None = any). `parallel`: options of `backend.parallel` (None =
    one device). `cache_dir`: folder of compiled graphs (None = no cache).

    Raises:
        BackendError: If an option is invalid.
        BackendUnavailable: If torch_xla does not match torch, or there is no such device.
    """

    spmd: Spmd | None = None

    def __init__(
        self, kind: str | None, parallel: Mapping[str, int] | None, cache_dir: str | Path | None
    ) -> None:
        _check_versions()
        try:
            self._start(parallel, cache_dir)
        except BackendError:
            raise
        except (RuntimeError, ImportError, OSError) as error:
            raise BackendUnavailable(
                f"device: torch_xla {version('torch_xla')} failed to start: {error}. The "
                f"environment variable PJRT_DEVICE ({os.environ.get('PJRT_DEVICE')!r}) sets the "
                f"kind of device, such as TPU or CPU."
            ) from error
        self._check_kind(kind)
        self._check_gradients()

    def _start(self, parallel: Mapping[str, int] | None, cache_dir: str | Path | None) -> None:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model
        from torch_xla.debug import metrics

        if cache_dir is not None:
            _begin_cache(str(Path(cache_dir).absolute()))
        if parallel is not None:  # before first use of the device
            self.spmd = Spmd(MeshShape.from_options(parallel, start_spmd()))
        self._xla: Any = torch_xla._XLAC
        self._pjrt: Any = runtime
        self._model: Any = xla_model
        self._metrics: Any = metrics
        self.sync: Callable[[], None] = torch_xla.sync
        """Run the recorded operations as one graph."""
        self.device: torch.device = torch_xla.device()
        self._name = str(self.device)

    def _check_kind(self, kind: str | None) -> None:
        found = self._pjrt.device_type()
        if kind is not None and found != kind.upper():
            raise BackendUnavailable(
                f"device: {kind!r} is not available: torch_xla only finds {found}. Set device: "
                f"xla to use that, or unset PJRT_DEVICE."
            )
        num = self._pjrt.global_runtime_device_count()
        if num > 1 and self.spmd is None:
            log.info(
                "%d devices found, but only one is used. Set backend: {parallel: {replicate: -1}} "
                "to use all.",
                num,
            )

    def _check_gradients(self) -> None:
        """Raise if autograd was started without this device."""
        probe = torch.zeros((), device=self.device, requires_grad=True)
        try:
            (probe * 2).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        except RuntimeError as error:
            raise BackendUnavailable(
                "device: this process ran backward() before it created an XLA device, so torch "
                "cannot compute gradients there. Call torch_xla.device() at the top of the "
                "program, or use a new process."
            ) from error

    # ---- the step

    def allow_launches(self, allowed: bool) -> None:
        """Set whether launching a graph raises: reading a recorded value launches one."""
        self._xla._set_allow_execution(allowed)

    def seed(self, seed: int) -> None:
        """Set the seed of random numbers."""
        self._xla._xla_set_rng_seed(seed, self._name)

    @property
    def rng_seed(self) -> int:
        """The seed of random numbers."""
        return int(self._xla._xla_get_rng_seed(self._name))

    def set_precision(self, precision: str) -> Callable[[], None]:
        """Set the precision of float32 matrix products; return a function that undoes it."""
        backends = importlib.import_module("torch_xla.backends")
        backends.set_mat_mul_precision(_PRECISIONS[precision])
        return lambda: backends.set_mat_mul_precision("default")

    def wait(self) -> None:
        """Wait for the device."""
        self._xla._xla_wait_device_ops(devices=[])

    # ---- values

    def send_batch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send host tensors of a batch, in one transfer."""
        return self._send(tensors, None if self.spmd is None else self.spmd.batch_spec)

    def send_state(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send host tensors of parameters or state, in one transfer."""
        return self._send(tensors, None if self.spmd is None else self.spmd.spec)

    def _send(
        self, tensors: Sequence[Tensor], spec: Callable[[Tensor], Any] | None
    ) -> list[Tensor]:
        # None becomes a constant of a graph, unlike single numbers moved by `to`.
        if not tensors:
            return []
        plain = [tensor.detach() for tensor in tensors]
        specs = None if spec is None else [spec(tensor) for tensor in plain]
        names = [self._name] * len(plain)
        sent: list[Tensor] = self._xla._xla_tensors_from_aten(plain, names, specs)
        return sent

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fetch tensors to the host, in one transfer. Waits for the device."""
        if not tensors:
            return []
        fetch = self._xla._xla_get_cpu_tensors if self.spmd is None else self.spmd.fetch
        return [tensor.detach() for tensor in fetch(list(tensors))]

    def id_of(self, tensor: Tensor) -> int:
        """Return an id shared by aliases of a tensor; the id of a view differs on each call."""
        return int(self._xla._xla_get_tensor_id(tensor))

    # ---- counts since the start of the process

    def num_made(self) -> int:
        """Return the number of created device tensors; unchanged = no operation was recorded."""
        return self._xla._xla_counter_value("CreateXlaTensor") or 0

    def num_compiled(self) -> int:
        """Return the number of compiled graphs."""
        return self._xla._xla_counter_value("UncachedCompile") or 0

    def num_fetched(self) -> int:
        """Return the number of transfers from the device."""
        return self._num_samples("TransferFromDeviceTime")

    def num_sent(self) -> int:
        """Return the number of transfers to the device."""
        return self._num_samples("TransferToDeviceTime")

    def num_executed(self) -> int:
        """Return the number of completed graph executions."""
        return self._num_samples("ExecuteTime") + self._num_samples("ExecuteReplicatedTime")

    def fallbacks(self) -> list[str]:
        """Return the names of operations that ran on the host."""
        return list(self._xla._get_executed_fallback_ops())

    def memory(self) -> dict[str, int]:
        """Return bytes of the device's memory, where supported."""
        try:
            found = self._model.get_memory_info(self.device)
        except RuntimeError:  # not supported on CPU devices
            return {}
        names = {"bytes_used": "device_allocated_bytes", "peak_bytes_used": "device_peak_bytes"}
        return {own: int(found[name]) for name, own in names.items() if found.get(name)}

    def _num_samples(self, metric: str) -> int:
        data = self._metrics.metric_data(metric)
        return 0 if data is None else int(data[0])


def _check_versions() -> None:
    """Check that torch_xla was built for this torch.

    Its package does not declare a torch requirement, so installers see no mismatch, and importing a
    wrong version fails with an undefined symbol.

    Raises:
        BackendUnavailable: If it was not.
    """
    found = version("torch_xla")
    wanted = ".".join(found.split(".")[:2])
    if torch.__version__.split(".")[:2] != wanted.split("."):
        raise BackendUnavailable(
            f"device: torch_xla {found} requires torch {wanted}, but torch {torch.__version__} "
            f"is installed. {_INSTALL} in a separate environment: it installs both."
        )


def _begin_cache(path: str) -> None:
    import torch_xla
    from torch_xla import runtime

    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / ".written").touch()
    except OSError as error:
        raise BackendError(
            f"backend.cache_dir: {path!r} is not writable: {error.strerror}. Use another folder, "
            f"or remove the option."
        ) from None
    if not torch_xla._XLAC._xla_computation_cache_is_initialized():
        runtime.initialize_cache(path)
    elif os.environ.get(_CACHE_PATH) != path:
        log.warning(
            "backend.cache_dir: %s is not used, because computations have already started in this "
            "process. Create the trainer before anything else uses the device.",
            path,
        )
