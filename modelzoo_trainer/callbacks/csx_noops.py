"""Callbacks of the configuration format that speak to other hardware: checked, and let be."""

from __future__ import annotations

from typing import Any

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.errors import ConfigError


class DebugArgsPath(Callback):
    """Accepted for the format's sake: there is no compiler here that reads debug arguments.

    Args:
        debug_args_path: Where they are; not opened. None = nowhere.

    Raises:
        ConfigError: If it is no path.
    """

    def __init__(self, debug_args_path: str | None) -> None:
        if debug_args_path is not None and not isinstance(debug_args_path, str):
            raise ConfigError(
                f"DebugArgsPath.debug_args_path is {debug_args_path!r}; it must be a path."
            )
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
