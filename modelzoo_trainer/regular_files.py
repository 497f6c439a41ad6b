"""Refuse pipes, sockets and devices where a run writes a file: opening one may wait forever."""

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
        path: Where a file is read or written; it may be missing.
        allow_device: Whether a device, such as `/dev/null`, may be there.

    Raises:
        ConfigError: If it is one.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # whoever opens it says why
        return
    for kind, is_one in {**_STREAMS, **({} if allow_device else _DEVICES)}.items():
        if is_one(mode):
            raise ConfigError(
                f"{str(path)!r} is a {kind}; a regular file must be there, or nothing. Remove it, "
                f"or choose another path."
            )
