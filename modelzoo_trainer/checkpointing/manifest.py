"""What a checkpoint consists of: its manifest, and the check of files against it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from modelzoo_trainer.errors import CheckpointError

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
_CHUNK: Final = 1 << 22  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Args:
        size_bytes: Its length.
        xxh3_128: Its digest, hexadecimal.
    """

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is written last: a directory without it is no checkpoint.

    Args:
        format_version: Of the layout of the directory.
        step: The global step.
        versions: Of the libraries that wrote it.
        files: All other files, by name.
    """

    format_version: int
    step: int
    versions: dict[str, str]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        """Return it as it is written."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


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
        CheckpointError: If it is not there, cannot be read, or is of an unknown version.
    """
    file = path / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(
            f"{str(path)!r} has no {MANIFEST}: it was never committed, or is no checkpoint."
        )
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = raw["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{str(path)!r} has format version {version!r}; this version reads "
                f"{FORMAT_VERSION}."
            )
        files = {str(name): FileRecord(**record) for name, record in raw["files"].items()}
        return Manifest(
            format_version=version, step=int(raw["step"]), versions=raw["versions"], files=files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error!r}.") from None


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint; an empty list if it is intact.

    Cost: Reads all files once.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    found = {entry.name for entry in path.iterdir()} - {MANIFEST}
    problems += [f"{name!r} is missing" for name in sorted(manifest.files.keys() - found)]
    problems += [
        f"{name!r} does not belong to it" for name in sorted(found - manifest.files.keys())
    ]
    for name in sorted(manifest.files.keys() & found):
        problem = _problem(path / name, manifest.files[name])
        if problem is not None:
            problems.append(f"{name!r} {problem}")
    return problems


def _problem(file: Path, expected: FileRecord) -> str | None:
    if file.is_symlink() or not file.is_file():
        return "is not a plain file"
    try:
        size = file.stat().st_size
        if size != expected.size_bytes:
            return f"has {size} bytes instead of {expected.size_bytes}"
        if record_of(file).xxh3_128 != expected.xxh3_128:
            return "is damaged: its digest is not the one that was written"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None
