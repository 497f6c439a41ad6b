"""What a checkpoint consists of: its manifest, and the check of files against it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any, Final

import xxhash

from modelzoo_trainer.errors import CheckpointError

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
_DIGEST: Final = "xxh3_128"  # of the manifest itself
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.(safetensors|json)")
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
        """Return it as it is written, with a digest of itself."""
        return _sealed(asdict(self))


def _sealed(manifest: dict[str, Any]) -> str:
    """Return the one text that stands for a manifest."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode("ascii"))
    return json.dumps(manifest | {_DIGEST: digest}, indent=1, sort_keys=True) + "\n"


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

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: If it is not there, cannot be read, is damaged, of an unknown version, or
            names files elsewhere.
    """
    file = path / MANIFEST
    try:
        if file.is_symlink():
            raise CheckpointError(f"{str(file)!r} is a symbolic link, not a file.")
        if not file.is_file():
            raise CheckpointError(
                f"{str(path)!r} has no {MANIFEST}: it was never committed, or is no checkpoint."
            )
        return _parse(file.read_text(encoding="ascii"), file)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error!r}.") from None


def _parse(text: str, file: Path) -> Manifest:
    raw = json.loads(text)
    version = raw["format_version"]
    if version != FORMAT_VERSION:  # first: another version may be sealed in another way
        raise CheckpointError(
            f"{str(file.parent)!r} has format version {version!r}; this version reads "
            f"{FORMAT_VERSION}."
        )
    raw.pop(_DIGEST, None)
    if text != _sealed(raw):
        raise CheckpointError(f"{str(file)!r} is damaged: it is not what was written.")
    outside = sorted(name for name in raw["files"] if not _NAME.fullmatch(name))
    if outside:
        raise CheckpointError(f"{str(file)!r} names {outside[0]!r}, which leads outside.")
    files = {name: FileRecord(**record) for name, record in raw["files"].items()}
    return Manifest(
        format_version=version, step=index(raw["step"]), versions=raw["versions"], files=files
    )


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint; an empty list if it is intact.

    Cost: Reads all files once.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error).removesuffix(".")]
    try:
        found = {entry.name for entry in path.iterdir()} - {MANIFEST}
    except OSError as error:
        return [f"{str(path)!r} cannot be read: {error.strerror or error}"]
    problems = []
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
    try:
        if file.is_symlink() or not file.is_file():
            return "is not a plain file"
        size = file.stat().st_size
        if size != expected.size_bytes:
            return f"has {size} bytes instead of {expected.size_bytes}"
        if record_of(file).xxh3_128 != expected.xxh3_128:
            return "is damaged: its digest is not the one that was written"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None
