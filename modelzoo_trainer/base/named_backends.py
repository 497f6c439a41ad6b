"""Create a backend by the name of its device, or by the dotted path of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelzoo_trainer.base.devices import Backend, make_backend
from modelzoo_trainer.base.user_modules import import_path, is_path
from modelzoo_trainer.errors import ConfigError


def named_backend(device: str, options: Mapping[str, Any]) -> Backend:
    """Create a backend; nothing starts before its `open`.

    Args:
        device: A name that `make_backend` knows, or `package.module.Class`.
        options: The backend's arguments.

    Raises:
        BackendError: If a name or an option is unknown, or the class is incomplete.
        BackendUnavailable: If the device does not exist.
        ConfigError: If there is nothing at the path, or no backend.
    """
    if not is_path(device):
        return make_backend(device, options)
    try:
        found = import_path(device)
    except ConfigError as error:
        raise ConfigError(f"device: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Backend)):
        name = getattr(found, "__name__", repr(found))
        raise ConfigError(
            f"device: {name} is not a backend: it is not a subclass of backends.Backend."
        )
    return make_backend(found, options)
