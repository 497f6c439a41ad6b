"""The calls by which a process changes a folder: counted, refused, cut short or recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

# By what they take: a path, two of them, or a descriptor.
_OF_PATH: Final = ("open", "mkdir", "unlink", "remove", "rmdir", "truncate", "chmod")
_OF_PATHS: Final = ("rename", "replace", "link", "symlink")
_OF_DESCRIPTOR: Final = (
    *("write", "writev", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate"),
    *("posix_fallocate", "fchmod", "close", "copy_file_range", "sendfile"),
)
WRITES: Final = ("write", "writev", "pwrite", "pwritev")
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the operating system that concerns the folder.

    Args:
        name: Of the function of `os`.
        path: What it is about; of a renaming, the old name.
        target: Of a renaming, the new name; of a link, its content.
        arguments: As they were given.
        real: The function itself.
    """

    name: str
    path: Path
    target: Path | None
    arguments: tuple[Any, ...]
    real: Callable[..., Any]


Perform = Callable[[Call, Callable[[], Any]], Any]


class Tap:
    """While it is entered, calls that concern a folder are handed to a function.

    What is written with `open()` or by a library is not seen; who counts compares with the disk.

    Args:
        folder: The folder.
        perform: Called with the call and what performs it; returns what the caller gets.
    """

    def __init__(self, folder: Path, perform: Perform) -> None:
        self.folder = folder.resolve()
        self.perform = perform
        self._real: dict[str, Callable[..., Any]] = {}
        self._is_inside = threading.local()

    def __enter__(self) -> Self:
        for name in (*_OF_PATH, *_OF_PATHS, *_OF_DESCRIPTOR):
            real = getattr(os, name, None)
            if real is not None:
                self._real[name] = real
                setattr(os, name, self._tapped(name, real))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _tapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if getattr(self._is_inside, "now", False):
                return real(*arguments, **options)
            call = self._call(name, real, arguments, options)
            if call is None:
                return real(*arguments, **options)
            self._is_inside.now = True
            try:
                return self.perform(call, lambda: real(*arguments, **options))
            finally:
                self._is_inside.now = False

        return called

    def _call(
        self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], options: Any
    ) -> Call | None:
        if name == "open" and not _flags(arguments, options) & _WRITING:
            return None
        target = None
        if name in _OF_DESCRIPTOR:
            path = path_of(arguments[0])
        else:
            path = self._path(arguments[0], options, "dir_fd", "src_dir_fd")
            if name in _OF_PATHS:
                target = self._path(arguments[1], options, "dst_dir_fd", "dir_fd")
                path, target = (target, path) if name in ("link", "symlink") else (path, target)
        if path is None or not (path == self.folder or self.folder in path.parents):
            return None
        return Call(name=name, path=path, target=target, arguments=arguments, real=real)

    def _path(self, given: Any, options: dict[str, Any], *names: str) -> Path | None:
        if isinstance(given, int):
            return path_of(given)
        path = Path(os.fsdecode(given))
        descriptor = next((options[name] for name in names if options.get(name) is not None), None)
        if descriptor is not None and not path.is_absolute():
            folder = path_of(descriptor)
            return None if folder is None else folder / path
        path = Path(os.path.abspath(path))
        return path.parent.resolve() / path.name


def _flags(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    flags: int = arguments[1] if len(arguments) > 1 else options["flags"]
    return flags


def path_of(descriptor: int) -> Path | None:
    """Return the path of an open file, as it is now."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return Path(path) if path.startswith("/") else None


class Counter:
    """Counts calls, and does something else than what was asked for at one of them.

    Args:
        at: Number of that call, from 0; None = none.
        instead: Called as a tap's `perform` is.
    """

    def __init__(self, at: int | None = None, instead: Perform | None = None) -> None:
        self.at = at
        self.instead = instead
        self.calls: list[Call] = []

    def __call__(self, call: Call, perform: Callable[[], Any]) -> Any:
        self.calls.append(call)
        if self.instead is not None and len(self.calls) - 1 == self.at:
            return self.instead(call, perform)
        return perform()

    @property
    def has_struck(self) -> bool:
        """Whether the call came."""
        return self.at is not None and len(self.calls) > self.at


def half_of(call: Call) -> int:
    """Write the first half of what was to be written, and return its length."""
    descriptor, data = call.arguments[:2]
    parts = [memoryview(part).cast("B") for part in (data if isinstance(data, list) else [data])]
    whole = b"".join(parts)
    rest = call.arguments[2:]
    name = call.name.removesuffix("v") if call.name.endswith("v") else call.name
    half = max(1, len(whole) // 2)
    if name == "pwrite":
        return os.pwrite(descriptor, whole[:half], *rest)
    return os.write(descriptor, whole[:half])
