"""Read regular files only: no pipes, sockets and devices, and no links out of a folder.

Opening one of the former may block forever, and a device may have no end; the latter have content
that the folder's owner did not put there. Every read of a file of a run goes through here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Final

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


_MOST: Final = 1 << 28
_READ: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path, *, inside: Path | None = None) -> IO[bytes]:
    """Open a regular file to read, without waiting for the other end of a pipe.

    Args:
        path: The file.
        inside: A folder, which symbolic links must not lead out of; None = they may.

    Raises:
        OSError: If it is not a regular file or cannot be opened.
    """
    if inside is not None:
        if outside_target(path, inside) is not None:
            raise OSError(errno.ELOOP, "a symbolic link out of its folder", str(path))
        path = Path(os.path.realpath(path))
    _require_file(path, path.stat())  # opening a device may have effects
    fd = os.open(path, _READ | (0 if inside is None else getattr(os, "O_NOFOLLOW", 0)))
    try:
        _require_file(path, os.fstat(fd))
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb")


def _require_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes(path: Path, *, most: int = _MOST, inside: Path | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: Its maximum size in bytes.
        inside: As for `open_regular`.

    Raises:
        OSError: If it is not a regular file, cannot be read or is larger.
    """
    with open_regular(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(most, size) + 1)  # reserves as much memory
        if len(content) > size:  # it has grown, or its size is not known
            content += file.read(most + 1 - len(content))
    if len(content) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path, *, most: int = _MOST, inside: Path | None = None) -> str:
    """Return the content of a regular file of UTF-8.

    Args:
        path: The file.
        most: Its maximum size in bytes.
        inside: As for `open_regular`.

    Raises:
        OSError: If it is not a regular file, cannot be read or is larger.
        UnicodeDecodeError: If it is not UTF-8.
    """
    return read_bytes(path, most=most, inside=inside).decode("utf-8")


_OF_HUB: Final = ("models--", "datasets--", "spaces--")


def require_inside(path: Path, folder: Path) -> None:
    """Check that no symbolic link leads from a path in a folder out of the folder.

    Args:
        path: A file in the folder; it may be missing.
        folder: The folder; a link to it is followed.

    Raises:
        ConfigError: If one does.
    """
    target = outside_target(path, folder)
    if target is not None:
        raise ConfigError(
            f"{str(path)!r} is a symbolic link to {str(target)!r}, outside of its folder; such "
            f"links are not followed. If you trust it, replace the link by a copy of the file."
        )


def require_files_inside(folder: Path, patterns: Iterable[str]) -> None:
    """Check that no file in a folder with one of these names is a link out of the folder.

    Args:
        folder: The folder; folders in it are not searched.
        patterns: Of names, such as `*.json`.

    Raises:
        ConfigError: If one is, by the first.
    """
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        require_inside(path, folder)


def outside_target(path: Path, folder: Path) -> Path | None:
    """Return where symbolic links lead from a path in a folder if that is outside, else None.

    In the cache of `huggingface_hub`, where the files of `snapshots/REVISION` are links to the
    folder `blobs` of the same repository, that folder counts as inside.

    Args:
        path: A path in the folder; it may be missing.
        folder: The folder; a link to it is followed.
    """
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if any(target.is_relative_to(one) for one in (home, *_blobs_of(home))):
        return None
    return target


def _blobs_of(folder: Path) -> list[Path]:
    """Return the folder of blobs for a snapshot in the cache of `huggingface_hub`."""
    snapshots, repository = folder.parent, folder.parent.parent
    is_snapshot = snapshots.name == "snapshots" and repository.name.startswith(_OF_HUB)
    return [repository / "blobs"] if is_snapshot else []
