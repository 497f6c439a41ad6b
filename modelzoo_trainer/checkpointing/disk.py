"""All file system calls in one module, the only place where the disk can fail.

Call these as `disk.write(...)`, so that tests can count, delay or fail each of them.
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
_OLD: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _DIRECT  # do not block on a pipe


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def make_new_folder(path: Path) -> None:
    """Create a folder; raise FileExistsError if it exists."""
    path.mkdir()


def open_new(path: Path) -> int:
    """Create a new file with the mode of the umask, and return its descriptor."""
    return os.open(path, _NEW, 0o666)


def open_again(path: Path) -> int:
    """Open a file for writing over what it has, or create it; for this user only."""
    return os.open(path, os.O_CREAT | os.O_WRONLY | _DIRECT, 0o600)


def truncate(fd: int, num_bytes: int) -> None:
    """Cut a file off."""
    os.ftruncate(fd, num_bytes)


def open_old(path: Path) -> int:
    """Open a file for reading; refuse symbolic links."""
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
    """Start writing data to the disk early, before `sync` waits for it."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only a hint
            os.posix_fadvise(fd, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def read_into(fd: int, view: memoryview) -> int:
    """Fill `view` with the next bytes and return their number; fewer only at the end."""
    end = 0
    while end < len(view):
        num_bytes = os.readv(fd, [view[end:]])
        if not num_bytes:
            break
        end += num_bytes
    return end


def read_at(fd: int, views: list[memoryview], position: int) -> int:
    """Fill `views` with the bytes at a position and return their number."""
    end = 0
    while views:
        num_bytes = os.preadv(fd, views, position + end)
        if not num_bytes:
            break
        end += num_bytes
        views = _after(views, num_bytes)
    return end


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the rest of `views` after their first bytes."""
    for number, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[number + 1 :]]
        num_bytes -= len(view)
    return []


def sync(fd: int) -> None:
    """Wait until a file is durable.

    After an error, lost pages may count as written: retrying on the same file proves nothing.
    """
    os.fsync(fd)


def close(fd: int) -> None:
    """Close a file."""
    os.close(fd)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Rename a file, a folder or a link."""
    os.rename(old, new)  # a single system call


def link(path: Path, target: str) -> None:
    """Create a symbolic link."""
    path.symlink_to(target)


def unlink(path: Path) -> None:
    """Remove a file or a link, if it exists."""
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a folder and its content, without following links."""
    shutil.rmtree(path)
