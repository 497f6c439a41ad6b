"""Callbacks of the Cerebras format that have no effect on this hardware, and HFCacheDir."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import Name, checked
from modelzoo_trainer.base.devices import hold_hf_cache_dir, loaded_hf_libraries
from modelzoo_trainer.callback import Callback
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class DebugArgsPath(Callback):
    """Accepted for compatibility; no effect, since no compiler here reads debug arguments.

    Args:
        debug_args_path: Path of the debug arguments; not opened. None = none.

    Raises:
        ConfigError: If it is not a path.
    """

    @checked()
    def __init__(self, debug_args_path: Annotated[str, "a path"] | None) -> None:
        self.debug_args_path = debug_args_path

    @property
    def notes(self) -> list[str]:
        """Arguments without effect."""
        if self.debug_args_path is None:
            return []
        return ["debug_args_path: no effect on this hardware; the file is not read."]


class WeightCompression(Callback):
    """Accepted for compatibility; no effect, since weights stay on the device.

    Args:
        compressions: One or more mappings with the keys `format` and `param_filter`.

    Raises:
        ConfigError: If one lacks a key.
    """

    def __init__(self, compressions: dict[str, Any] | list[dict[str, Any]]) -> None:
        given = [compressions] if isinstance(compressions, dict) else compressions
        if not isinstance(given, list):
            raise ConfigError(
                f"WeightCompression.compressions must be a dict or a list of dicts, got "
                f"{compressions!r}."
            )
        for one in given:
            missing = {"format", "param_filter"} - set(one if isinstance(one, dict) else ())
            if missing:
                raise ConfigError(
                    f"WeightCompression.compressions: each entry requires format and "
                    f"param_filter; {one!r} has no {min(missing)}."
                )
        self.compressions = given

    @property
    def notes(self) -> list[str]:
        """Arguments without effect."""
        return ["compressions: no effect on this hardware; weights stay as they are."]


log = logging.getLogger("modelzoo_trainer")


class HFCacheDir(Callback):
    """Set the cache folder of the Hugging Face libraries until the trainer is closed.

    The environment of this process and of those that it starts is set before the model is built.
    A library that was imported earlier may ignore it; that is logged.

    Args:
        cache_dir: The folder; `~` is expanded. It need not exist.

    Raises:
        ConfigError: If it is empty, or is a file.
    """

    @checked()
    def __init__(self, cache_dir: Annotated[Name, "the name of a folder"]) -> None:
        self.cache_dir = Path(cache_dir).expanduser().absolute()
        if self.cache_dir.is_file():
            raise ConfigError(
                f"HFCacheDir.cache_dir is {cache_dir!r}, which is a file; it must be a folder."
            )
        self._restore: Callable[[], None] | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        loaded = loaded_hf_libraries()
        if loaded and trainer.backend.comm.is_main:
            log.warning(
                "HFCacheDir: already imported libraries (%s) may continue to use a folder other "
                "than %s.",
                ", ".join(loaded),
                self.cache_dir,
            )
        self.finalize()
        self._restore = hold_hf_cache_dir(str(self.cache_dir))

    @override
    def finalize(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
