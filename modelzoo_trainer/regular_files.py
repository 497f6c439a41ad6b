"""Refusal of pipes, sockets and devices as files of a run: opening one may block forever."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from modelzoo_trainer.errors import ConfigError

_Is = Callable[[int], bool]
_DEVICES: Final[dict[str, _Is]] = {"device": stat.S_ISCHR, "block device": stat.S_ISBLK}
_STREAMS: Final[dict[str, _Is]] = {"named pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}


def require_regular(path: Path, *, allow_device: bool = False) -> None:
    """Check that a path is not a named pipe, a socket or a device, without opening it.

    Args:
        path: A file to read or write; it may be missing.
        allow_device: Whether a device, such as `/dev/null`, is allowed.

    Raises:
        ConfigError: If it is one.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it will raise
        return
    for kind, is_one in {**_STREAMS, **({} if allow_device else _DEVICES)}.items():
        if is_one(mode):
            raise ConfigError(
                f"{str(path)!r} is a {kind}; it must be a regular file or not exist. Remove it, "
                f"or choose another path."
            )
