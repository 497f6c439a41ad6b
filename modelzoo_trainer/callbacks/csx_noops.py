"""Callbacks of the configuration format that do nothing on this hardware, and HFCacheDir."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.constraints import Name, checked
from modelzoo_trainer.devices import hold_hf_cache_dir, loaded_hf_libraries
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class DebugArgsPath(Callback):
    """Accepted for the format's sake: there is no compiler here that reads debug arguments.

    Args:
        debug_args_path: Where they are; not opened. None = nowhere.

    Raises:
        ConfigError: If it is not a path.
    """

    @checked()
    def __init__(self, debug_args_path: Annotated[str, "a path"] | None) -> None:
        self.debug_args_path = debug_args_path

    @property
    def notes(self) -> list[str]:
        """What has no effect here."""
        if self.debug_args_path is None:
            return []
        return ["debug_args_path: no effect on this hardware; the file is not read."]


class WeightCompression(Callback):
    """Accepted for the format's sake: weights stay on the device, so none are compressed.

    Args:
        compressions: One, or several, each with `format` and `param_filter`.

    Raises:
        ConfigError: If one lacks either.
    """

    def __init__(self, compressions: dict[str, Any] | list[dict[str, Any]]) -> None:
        given = [compressions] if isinstance(compressions, dict) else compressions
        if not isinstance(given, list):
            raise ConfigError(
                f"WeightCompression.compressions is {compressions!r}; it must be a mapping, or a "
                f"list of them."
            )
        for one in given:
            missing = {"format", "param_filter"} - set(one if isinstance(one, dict) else ())
            if missing:
                raise ConfigError(
                    f"WeightCompression.compressions: {one!r} lacks {min(missing)}; each has "
                    f"format and param_filter."
                )
        self.compressions = given

    @property
    def notes(self) -> list[str]:
        """What has no effect here."""
        return ["compressions: no effect on this hardware; weights stay as they are."]


log = logging.getLogger("modelzoo_trainer")


class HFCacheDir(Callback):
    """Has Hugging Face's libraries use a folder for models and data, until the trainer is closed.

    The environment of this process and of those that it starts says so from before the model is
    built. A library that was imported earlier has read it already; that is logged.

    Args:
        cache_dir: The folder; `~` is the user's. It need not be there.

    Raises:
        ConfigError: If it is empty, or is a file.
    """

    @checked()
    def __init__(self, cache_dir: Annotated[Name, "the name of a folder"]) -> None:
        self.cache_dir = Path(cache_dir).expanduser().absolute()
        if self.cache_dir.is_file():
            raise ConfigError(
                f"HFCacheDir.cache_dir is {cache_dir!r}, which is a file; it must name a folder."
            )
        self._let_go: Callable[[], None] | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        loaded = loaded_hf_libraries()
        if loaded and trainer.backend.comm.is_main:
            log.warning(
                "HFCacheDir: %s had been imported already and may continue to use "
                "another folder than %s.",
                ", ".join(loaded),
                self.cache_dir,
            )
        self.finalize()
        self._let_go = hold_hf_cache_dir(str(self.cache_dir))

    @override
    def finalize(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()
