"""Everything that touches the disk, act by act: the one place where a disk can refuse.

Call these as `disk.write(...)`, so that a test can count, slow down or refuse each of them.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
_DIRECT: Final = os.O_CLOEXEC | _NO_LINK
_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _DIRECT
_OLD: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _DIRECT  # a pipe must not be waited for


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, safe from a power loss."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_new_folder(path: Path) -> None:
    """Make a folder; raise FileExistsError if the name is in use."""
    path.mkdir()


def open_new(path: Path) -> int:
    """Make a file that is not there, with the mode of the umask, and return its descriptor."""
    return os.open(path, _NEW, 0o666)


def open_old(path: Path) -> int:
    """Open a file to be read; a symbolic link is refused."""
    return os.open(path, _OLD)


def write(fd: int, view: bytes | memoryview) -> int:
    """Write all of `view` and return its length."""
    rest = memoryview(view)
    while rest:
        try:
            written = os.write(fd, rest)
        except InterruptedError:
            continue
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = rest[written:]
    return len(view)


def start_writing_back(fd: int, begin: int, num_bytes: int) -> None:
    """Let the disk begin with what has been written, long before `sync` waits for it."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint
            os.posix_fadvise(fd, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def read_into(fd: int, view: memoryview) -> int:
    """Fill `view` with the next bytes and return how many there were, fewer only at the end."""
    end = 0
    while end < len(view):
        num_bytes = os.readv(fd, [view[end:]])
        if not num_bytes:
            break
        end += num_bytes
    return end


def read_at(fd: int, views: list[memoryview], position: int) -> int:
    """Fill `views` with the bytes at a position and return how many there were."""
    end = 0
    while views:
        num_bytes = os.preadv(fd, views, position + end)
        if not num_bytes:
            break
        end += num_bytes
        views = _after(views, num_bytes)
    return end


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of views when their first bytes are full."""
    for number, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[number + 1 :]]
        num_bytes -= len(view)
    return []


def sync(fd: int) -> None:
    """Wait until a file is safe from a power loss.

    An error means that pages may be lost that count as written from now on: no second try on the
    same file says anything.
    """
    os.fsync(fd)


def close(fd: int) -> None:
    """Close a file."""
    os.close(fd)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are safe from a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Give a file, a folder or a link another name."""
    os.rename(old, new)  # as one call of the system, whatever `Path` makes of it


def link(path: Path, target: str) -> None:
    """Make a symbolic link."""
    path.symlink_to(target)


def unlink(path: Path) -> None:
    """Remove a file or a link; one that is not there is none to remove."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it; a link is never followed."""
    shutil.rmtree(path)
