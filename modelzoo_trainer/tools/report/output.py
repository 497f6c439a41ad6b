"""Write the report, without overwriting other files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report.page import MARKER

_HEAD_BYTES: Final = 2000


def check_target(path: Path) -> None:
    """Check that a report can be written to a path.

    Raises:
        ConfigError: If it exists and is not a report, or its folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder. Pass a file, such as {path}/report.html.")
    if not path.parent.is_dir():
        raise ConfigError(f"{str(path)!r}: the folder {str(path.parent)!r} does not exist.")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is not a regular file. Choose another path.")
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise _unwritable(path, error) from None
    if head and MARKER.encode() not in head:
        raise ConfigError(
            f"{str(path)!r} exists and is not a report; it was not overwritten. Choose another "
            f"path, or remove the file."
        )


def write_report(path: Path, html: str) -> None:
    """Write a report atomically.

    Raises:
        ConfigError: If the path exists and is not a report, or cannot be written.
    """
    check_target(path)
    target = path.resolve()  # keeps a symbolic link
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        with fresh.open("x", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(html)
        fresh.replace(target)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the report {str(path)!r} cannot be written: {error.strerror or error}.")
