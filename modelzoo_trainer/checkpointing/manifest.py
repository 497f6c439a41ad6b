"""What a checkpoint consists of: its manifest, written last and read first, and its files."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.errors import CheckpointError

FORMAT_VERSION: Final = 2
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
SUFFIX: Final = ".safetensors"  # of files of tensors
_DIGEST: Final = "xxh3_128"  # of the manifest itself
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.(safetensors|json)")
_HEX: Final = re.compile(r"[0-9a-f]{32}")
_CHUNK: Final = 1 << 22  # bytes
_MAX_BYTES: Final = 1 << 24  # of a manifest: a hundred thousand files
_PROBLEMS: Final = (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is written last: a directory without it is no checkpoint."""

    format_version: int  # of the layout of the directory
    name: str  # of the directory, when it was committed; "" = of format 1, which did not say
    step: int  # the global one
    versions: dict[str, str]  # of what wrote it
    files: dict[str, FileRecord]  # all other files, by name
    # what else the writer wanted to be known without reading the state
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as it is written, with a digest of itself."""
        return _sealed(asdict(self))


def _sealed(manifest: dict[str, Any]) -> str:
    """Return the one text that stands for a manifest."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode("ascii"))
    return json.dumps(manifest | {_DIGEST: digest}, indent=1, sort_keys=True) + "\n"


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may be called that."""
    return _NAME.fullmatch(name) is not None


def record_of(path: Path) -> FileRecord:
    """Return a file's size and digest."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())


def read_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: If it is not there, cannot be read, is damaged, of an unknown version,
            names files elsewhere, or belongs to a directory of another name.
    """
    file = path / MANIFEST
    try:
        if path.is_symlink():
            raise CheckpointError(
                f"{str(path)!r} is a symbolic link to {os.readlink(path)!r}; name the checkpoint "
                f"itself."
            )
        if file.is_symlink():
            raise CheckpointError(f"{str(file)!r} is a symbolic link, not a file.")
        if not file.is_file():
            raise CheckpointError(
                f"{str(path)!r} has no {MANIFEST}: it was never committed, or is no checkpoint."
            )
        return parse_manifest(text_of(file), path)
    except _PROBLEMS as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error!r}.") from None


def text_of(file: Path) -> str:
    """Return the content of a small file of ASCII text; nothing else is waited for or followed.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no plain file, too long, or not ASCII.
    """
    fd = disk.open_old(file)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"it is no file, or has more than {_MAX_BYTES} bytes")
        content = memoryview(bytearray(status.st_size))
        found = disk.read_into(fd, content)
    finally:
        disk.close(fd)
    return str(content[:found], "ascii")


def parse_manifest(text: str, path: Path) -> Manifest:
    """Return the manifest that a text stands for.

    Raises:
        CheckpointError: If it is damaged, of an unknown version, or does not fit the directory.
        ValueError: If it is no manifest; other malformed ones raise LookupError, TypeError,
            AttributeError or RecursionError.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    raw = json.loads(text)
    version = raw["format_version"]
    migrate = _MIGRATIONS.get(version) if type(version) is int else None
    if migrate is None:  # first: another version may be sealed in another way
        raise CheckpointError(
            f"{str(path)!r} has format version {version!r}; this version reads up to "
            f"{FORMAT_VERSION}. Read it with the version of modelzoo_trainer that wrote it."
        )
    raw.pop(_DIGEST, None)
    if text != _sealed(raw):
        raise CheckpointError(f"{str(path / MANIFEST)!r} is damaged: it is not what was written.")
    manifest = _manifest_of(migrate(raw), path)
    right, given = manifest.name, Path(os.path.abspath(path)).name  # no link followed
    if right and right != given:
        raise CheckpointError(
            f"{str(path)!r} was renamed: it was written as {right!r}. Give it that name again; it "
            f"may be copied into any folder."
        )
    return manifest


_MIGRATIONS: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    1: lambda raw: raw | {"name": "", "facts": {}},
    2: lambda raw: raw,
}


def _manifest_of(raw: dict[str, Any], path: Path) -> Manifest:
    outside = sorted(name for name in raw["files"] if not is_file_name(name) or name == MANIFEST)
    if outside:
        raise CheckpointError(
            f"{str(path / MANIFEST)!r} names {outside[0]!r}, which leads outside."
        )
    if type(raw["step"]) is not int or raw["step"] < 0:
        raise ValueError(f"its step is {raw['step']!r}")
    if not isinstance(raw["name"], str) or not isinstance(raw["facts"], dict):
        raise ValueError(f"its name is {raw['name']!r}, and its facts are {raw['facts']!r}")
    return Manifest(
        format_version=raw["format_version"],
        name=raw["name"],
        step=raw["step"],
        versions={name: str(version) for name, version in raw["versions"].items()},
        files={name: _record_of(record) for name, record in raw["files"].items()},
        facts=raw["facts"],
    )


def _record_of(raw: dict[str, Any]) -> FileRecord:
    size, digest = raw["size_bytes"], raw["xxh3_128"]
    if type(size) is not int or size < 0 or not _HEX.fullmatch(digest):
        raise ValueError(f"it has a file of {size!r} bytes with the digest {digest!r}")
    return FileRecord(size_bytes=size, xxh3_128=digest)


def listing_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with a checkpoint that can be seen without reading its files."""
    try:
        found = {entry.name: entry for entry in path.iterdir() if entry.name != MANIFEST}
    except OSError as error:
        return [f"{str(path)!r} cannot be read: {error.strerror or error}"]
    known = manifest.files
    problems = [f"{name!r} is missing" for name in sorted(known.keys() - found.keys())]
    problems += [f"{name!r} does not belong to it" for name in sorted(found.keys() - known.keys())]
    for name in sorted(known.keys() & found.keys()):
        problem = _problem(found[name], known[name].size_bytes)
        if problem is not None:
            problems.append(f"{name!r} {problem}")
    return problems


def _problem(file: Path, num_bytes: int) -> str | None:
    try:
        if file.is_symlink() or not file.is_file():
            return "is not a plain file"
        size = file.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if size == num_bytes else f"has {size} bytes instead of {num_bytes}"


def check_listing(path: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError if names or sizes are not those of the manifest."""
    problems = listing_problems(path, manifest)
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be used: {'; '.join(problems)}. Choose another one."
        )
