"""Create a backend by the name of its device, or by the dotted path of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelzoo_trainer.base.devices import Backend, BackendError, make_backend
from modelzoo_trainer.base.user_modules import import_path, is_path
from modelzoo_trainer.errors import ConfigError


def named_backend(device: str, options: Mapping[str, Any], key: str = "device") -> Backend:
    """Create a backend; nothing starts before its `open`.

    Args:
        device: A name that `make_backend` knows, or `package.module.Class`.
        options: The backend's arguments.
        key: Where the name was given, for messages.

    Raises:
        BackendError: If a name or an option is unknown, or the class is incomplete.
        BackendUnavailable: If the device does not exist.
        ConfigError: If there is nothing at the path, or no backend.
    """
    try:
        return make_backend(_class_at(device) if is_path(device) else device, options)
    except (BackendError, ConfigError) as error:
        said = str(error)
        if key == "device" or not said.startswith("device: "):
            raise
        raise type(error)(key + said.removeprefix("device")) from None


def _class_at(path: str) -> type[Backend]:
    try:
        found = import_path(path)
    except (BackendError, ConfigError) as error:
        raise ConfigError(f"device: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Backend)):
        name = getattr(found, "__name__", repr(found))
        raise ConfigError(
            f"device: {name} is not a backend. Derive it from backends.Backend, or from a backend "
            f"such as backends.cpu.CpuBackend."
        )
    return found
