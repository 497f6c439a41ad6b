"""A disk that loses its power: what may be found afterwards, given what was done and synchronised.

Stricter than file systems are: until a file is synchronised any of its writes may be lost, torn, or
done without earlier ones; until a folder is synchronised any change of its names likewise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tests.reliability.disk_calls import Call

Tree: TypeAlias = "dict[str, Tree | bytes]"
T = TypeVar("T")


class UnknownCall(Exception):
    """The simulation does not know what such a call does."""


@dataclass(slots=True, eq=False)
class File:
    """A file.

    Args:
        data: Its content, for who reads it now.
        safe: Its content when it was synchronised last.
        pending: What was written since: offset and bytes.
    """

    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        self.safe, self.pending = bytes(self.data), []

    def write(self, offset: int, new: bytes) -> None:
        put(self.data, offset, new)
        self.pending.append((offset, new))

    def left(self, generator: random.Random) -> bytes:
        """Return what may be left of it."""
        content = bytearray(self.safe)
        for offset, new in some_of(self.pending, generator):
            is_torn = generator.random() < 0.2
            put(content, offset, new[: generator.randrange(len(new) + 1)] if is_torn else new)
        return bytes(content)


@dataclass(slots=True, eq=False)
class Folder:
    """A folder.

    Args:
        names: What it holds, for who looks now.
        safe: What it held when it was synchronised last.
        pending: Changes since: names, and what each stands for afterwards (None = nothing).
    """

    names: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def sync(self) -> None:
        self.safe, self.pending = dict(self.names), []

    def change(self, changes: dict[str, File | Folder | None]) -> None:
        apply(self.names, changes)
        self.pending.append(changes)

    def left(self, generator: random.Random) -> Tree:
        """Return what may be left of it, and of what it holds."""
        names = dict(self.safe)
        for changes in some_of(self.pending, generator):
            apply(names, changes)
        return {name: names[name].left(generator) for name in sorted(names)}


def apply(names: dict[str, File | Folder], changes: dict[str, File | Folder | None]) -> None:
    """Change the names of a folder, all at once."""
    for name, meant in changes.items():
        if meant is None:
            names.pop(name, None)
        else:
            names[name] = meant


def put(data: bytearray, offset: int, new: bytes) -> None:
    """Write into a file; a hole reads as zeros."""
    data.extend(b"\0" * (offset - len(data)))
    data[offset : offset + len(new)] = new


def some_of(pending: Sequence[T], generator: random.Random) -> Sequence[T]:
    """Return what is done of what was not synchronised: all, none, the first ones, or any."""
    kind = generator.choice(["all", "none", "first", "any"])
    if kind == "all":
        return pending
    if kind == "first":
        return pending[: generator.randrange(len(pending) + 1)]
    return [item for item in pending if kind == "any" and generator.random() < 0.5]


class Disk:
    """What is on a disk, what is safe of it, and what is still on its way.

    Args:
        root: The real folder, empty, whose calls it is told.
        ignored: A kind of synchronisation that does nothing: "file", "folder", or None.
    """

    def __init__(self, root: Path, ignored: str | None = None) -> None:
        self.root = root.resolve()
        self.ignored = ignored
        self.tree = Folder()
        self._opened: dict[int, tuple[File, int]] = {}
        self._acts: dict[str, Callable[[Call, Any], None]] = {
            "open": self._open,
            "write": self._write,
            "writev": self._write,
            "close": lambda call, result: self._close(call),
            "fsync": lambda call, result: self._sync(call),
            "fdatasync": lambda call, result: self._sync(call),
            "mkdir": lambda call, result: self._name(call.path, Folder()),
            "symlink": lambda call, result: self._name(call.path, File(safe=b"link")),
            "rename": lambda call, result: self._rename(call),
            "replace": lambda call, result: self._rename(call),
            "unlink": lambda call, result: self._name(call.path, None),
            "remove": lambda call, result: self._name(call.path, None),
            "rmdir": lambda call, result: self._name(call.path, None),
            "chmod": lambda call, result: None,
            "fchmod": lambda call, result: None,
        }

    def tell(self, call: Call, result: Any) -> None:
        """Take over what a call has done.

        Raises:
            UnknownCall: If that cannot be simulated.
        """
        if call.name not in self._acts:
            raise UnknownCall(f"{call.name} of {call.path}")
        self._acts[call.name](call, result)

    def find(self, path: Path) -> File | Folder:
        """Return what a path stands for."""
        found: File | Folder = self.tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.names[name]
        return found

    def _name(self, path: Path, meant: File | Folder | None) -> None:
        self._folder(path).change({path.name: meant})

    def _folder(self, path: Path) -> Folder:
        found = self.find(path.parent)
        assert isinstance(found, Folder)
        return found

    def _open(self, call: Call, descriptor: int) -> None:
        if call.path.name not in self._folder(call.path).names:
            self._name(call.path, File())
        found = self.find(call.path)
        assert isinstance(found, File)
        self._opened[descriptor] = (found, 0)

    def _write(self, call: Call, num_bytes: int) -> None:
        descriptor, data = call.arguments[:2]
        parts = data if isinstance(data, list) else [data]
        whole = b"".join(bytes(memoryview(part).cast("B")) for part in parts)[:num_bytes]
        file, position = self._opened[descriptor]
        file.write(position, whole)
        self._opened[descriptor] = (file, position + num_bytes)

    def _sync(self, call: Call) -> None:
        found = self.find(call.path)
        if self.ignored != type(found).__name__.lower():
            found.sync()

    def _close(self, call: Call) -> None:
        self._opened.pop(call.arguments[0], None)

    def _rename(self, call: Call) -> None:
        assert call.target is not None  # it has one
        if call.path.parent != call.target.parent:
            raise UnknownCall(f"{call.path} is moved to {call.target}")
        moved = self.find(call.path)
        self._folder(call.path).change({call.path.name: None, call.target.name: moved})

    def now(self) -> Tree:
        """Return what is there for who looks now; links are left out."""
        return _now(self.tree)


def _now(folder: Folder) -> Tree:
    found: Tree = {}
    for name, meant in sorted(folder.names.items()):
        if isinstance(meant, Folder):
            found[name] = _now(meant)
        elif meant.safe != b"link":
            found[name] = bytes(meant.data)
    return found


def read(folder: Path) -> Tree:
    """Return what is in a real folder; links are left out."""
    return {
        path.name: read(path) if path.is_dir() else path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.is_symlink()
    }


def write(tree: Tree, folder: Path) -> None:
    """Write that into a real folder, which is made."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write(content, folder / name)
