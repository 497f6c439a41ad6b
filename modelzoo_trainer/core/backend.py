"""The backend of a run: opened first, closed last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.base.devices import Backend, BackendError, BackendUnavailable
from modelzoo_trainer.base.named_backends import named_backend
from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class BackendCallback(CoreCallback):
    """Create and open the backend before a device is used.

    Args:
        backend: A backend, or options for the backend of `device`.
        device: A device name, case-insensitive; "auto" = the available accelerator, else the CPU.
            Or the dotted path of a subclass of `backends.Backend`. None = "cpu", or the type given
            by `backend`.

    Raises:
        ConfigError: If both a backend and a device are given, or one is invalid.
    """

    def __init__(
        self, backend: Backend | Mapping[str, Any] | None = None, device: str | None = None
    ) -> None:
        if isinstance(backend, Backend):
            if device is not None:
                raise ConfigError(
                    f"device ({device!r}) and a Backend object are both given. Remove device: the "
                    f"Backend object has its own."
                )
        elif backend is not None and not isinstance(backend, Mapping):
            raise ConfigError(
                f"backend must be a Backend object or a dict of options, got {backend!r}. To "
                f"choose a device, pass device='cpu'."
            )
        if device is not None and not isinstance(device, str):
            raise ConfigError(f"device must be a name such as 'cpu' or 'auto', got {device!r}.")
        self._backend = backend
        self._device = device
        self._opened: Backend | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        try:
            backend = self._make()
            backend.seed = trainer.reproducibility.step_seed
            backend.open()
            trainer.reproducibility.share_seed(backend)
        except BackendUnavailable:
            raise
        except BackendError as error:
            raise ConfigError(str(error)) from None
        self._opened = backend
        trainer.backend = backend

    @override
    def on_rollback(self, trainer: Trainer, ckpt_path: Path) -> None:
        trainer.backend.reads.clear()

    def _make(self) -> Backend:
        if isinstance(self._backend, Backend):
            return self._backend
        options = dict(self._backend or {})
        named = options.pop("backend_type", None)
        key = "device" if self._device or not named else "backend.backend_type"
        return named_backend(self._device or named or "cpu", options, key)

    @override
    def finalize(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
