"""The manifest of a checkpoint: lists its files, written last and read first."""

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

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.stores.reading import is_in_mirror
from modelzoo_trainer.errors import CheckpointError, NewerFormat, reason_of

FORMAT_VERSION: Final = 2
MANIFEST: Final = "manifest.json"
_ADAPTER: Final = "adapter_config.json"
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
    """Content of the manifest; a directory without one is not a checkpoint."""

    format_version: int  # version of the directory layout
    name: str  # of the directory when committed; "" = format 1, without a name
    step: int  # global step
    versions: dict[str, str]  # of the software that wrote it
    files: dict[str, FileRecord]  # all other files, by name
    # additional entries, readable without the state
    facts: dict[str, Any] = field(default_factory=dict)
    # under which some of its files were uploaded before it was written; "" = none
    attempt: str = ""

    def to_json(self) -> str:
        """Return the manifest as JSON, with a digest of itself."""
        raw = asdict(self)
        if not self.attempt:
            del raw["attempt"]
        return _sealed(raw)


def _sealed(manifest: dict[str, Any]) -> str:
    """Return the canonical text of a manifest."""
    return json.dumps(manifest | {_DIGEST: _digest_of(manifest)}, indent=1, sort_keys=True) + "\n"


def _digest_of(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode("ascii"))


def _is_newer(raw: dict[str, Any]) -> bool:
    """Return whether the version is newer than this one, and no damaged digit of a known one."""
    version = raw["format_version"]
    if type(version) is not int or version <= FORMAT_VERSION:
        return False
    others = {key: value for key, value in raw.items() if key != _DIGEST}
    known = [_digest_of(others | {"format_version": one}) for one in _MIGRATIONS]
    return raw.get(_DIGEST) not in known


def is_file_name(name: str) -> bool:
    """Return whether a name is valid for a file of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def record_of(path: Path) -> FileRecord:
    """Return a file's size and digest."""
    digest = xxhash.xxh3_128()
    size = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: If it is missing, unreadable, damaged, of an unknown version
            (`NewerFormat`: a newer one), refers to files elsewhere, or belongs to a directory of
            another name.
    """
    file = path / MANIFEST
    try:
        if path.is_symlink():
            raise CheckpointError(
                f"{str(path)!r} is a symbolic link to {os.readlink(path)!r}. Pass the path of the "
                f"checkpoint itself."
            )
        if file.is_symlink():
            raise CheckpointError(
                f"{str(file)!r} is a symbolic link; it must be a regular file. Copy the files "
                f"themselves into the checkpoint, such as with cp -rL."
            )
        if not file.is_file():
            problem = f"has no {MANIFEST}: saving it was interrupted, or it is not a checkpoint"
            problem = problem if os.path.lexists(path) else "does not exist"
            if (path / _ADAPTER).is_file():
                raise CheckpointError(
                    f"{str(path)!r} has an adapter of peft, which is not a whole model. Merge it "
                    f"(merge_and_unload, then save_pretrained, of peft) and use that folder."
                )
            raise CheckpointError(f"{str(path)!r} {problem}. Use another checkpoint.")
        return parse_manifest(text_of(file), path)
    except _PROBLEMS as error:
        remedy = "Check permissions, or use" if isinstance(error, OSError) else "Use"
        raise CheckpointError(
            f"{str(file)!r} cannot be read: {reason_of(error)}. {remedy} another checkpoint."
        ) from None


def text_of(file: Path) -> str:
    """Read a small ASCII file without blocking and without following links.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a regular file, too long, or not ASCII.
    """
    fd = disk.open_old(file)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"it is not a regular file, or larger than {_MAX_BYTES} bytes")
        content = memoryview(bytearray(status.st_size))
        found = disk.read_into(fd, content)
    finally:
        disk.close(fd)
    return str(content[:found], "ascii")


def parse_manifest(text: str, path: Path) -> Manifest:
    """Parse a manifest.

    Raises:
        CheckpointError: If it is damaged, of an unknown version, or does not match the directory.
        ValueError: If it is not a manifest; may also raise LookupError, TypeError, AttributeError
            or RecursionError.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f"the manifest is larger than {_MAX_BYTES} bytes")
    raw = json.loads(text)
    version = raw["format_version"]
    migrate = _MIGRATIONS.get(version) if type(version) is int else None
    if migrate is None:  # first: other versions may compute the digest differently
        raise (NewerFormat if _is_newer(raw) else CheckpointError)(
            f"{str(path)!r} has format version {version!r}; this version of modelzoo_trainer "
            f"reads format versions up to {FORMAT_VERSION}. Install the version of "
            f"modelzoo_trainer that saved the checkpoint."
        )
    raw.pop(_DIGEST, None)
    if text != _sealed(raw):
        raise CheckpointError(
            f"{str(path / MANIFEST)!r} is damaged (checksum mismatch). Use an earlier checkpoint, "
            f"or restore this one from a copy."
        )
    manifest = _manifest_of(migrate(raw), path)
    name, given = manifest.name, Path(os.path.abspath(path)).name  # no link followed
    if name and name != given:
        raise CheckpointError(
            f"{str(path)!r} was renamed: it was saved as {name!r}. Rename it back to {name!r}. "
            f"(The folder may be moved or copied, but not renamed.)"
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
            f"{str(path / MANIFEST)!r} lists {outside[0]!r}, which cannot be a file of a "
            f"checkpoint. Do not load the checkpoint: it was damaged or tampered with."
        )
    if type(raw["step"]) is not int or raw["step"] < 0:
        raise ValueError(f"'step' must be an integer >= 0, got {raw['step']!r}")
    if not isinstance(raw["name"], str) or not isinstance(raw["facts"], dict):
        raise ValueError(
            f"'name' must be a string and 'facts' a JSON object; got name={raw['name']!r} and "
            f"facts={raw['facts']!r}"
        )
    return Manifest(
        format_version=raw["format_version"],
        name=raw["name"],
        step=raw["step"],
        versions={name: str(version) for name, version in raw["versions"].items()},
        files={name: _record_of(name, record) for name, record in raw["files"].items()},
        facts=raw["facts"],
        attempt=str(raw.get("attempt", "")),
    )


def _record_of(name: str, raw: dict[str, Any]) -> FileRecord:
    size, digest = raw["size_bytes"], raw["xxh3_128"]
    if type(size) is not int or size < 0 or not _HEX.fullmatch(digest):
        raise ValueError(
            f"{name!r} must have an integer >= 0 as size_bytes and 32 hex digits as xxh3_128; got "
            f"size_bytes={size!r} and xxh3_128={digest!r}"
        )
    return FileRecord(size_bytes=size, xxh3_128=digest)


def listing_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return problems that are visible without reading the files.

    In the local copy of an object store, files may be missing: they are downloaded when needed.
    """
    try:
        names = {entry.name for entry in path.iterdir()} - {MANIFEST}
    except OSError as error:
        return [f"{str(path)!r} cannot be read: {error.strerror or error}"]
    known = manifest.files
    unknown = sorted(names - known.keys())
    problems = [f"{name!r} is not in the manifest" for name in unknown]
    missing = sorted(known.keys() - names)
    for name in sorted(known.keys() & names):
        try:
            problem = _problem((path / name).lstat(), known[name].size_bytes)
        except FileNotFoundError:  # removed in the meantime
            missing.append(name)
            continue
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        if problem is not None:
            problems.append(f"{name!r} {problem}")
    if missing and not is_in_mirror(path):
        problems = [*(f"{name!r} is missing" for name in missing), *problems]
    return problems


def _problem(status: os.stat_result, num_bytes: int) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    size = status.st_size
    return None if size == num_bytes else f"has {size} bytes, expected {num_bytes}"


def check_listing(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if names or sizes differ from the manifest."""
    problems = listing_problems(path, manifest)
    if problems:
        raise CheckpointError(
            f"Checkpoint {str(path)!r} cannot be used: {'; '.join(problems)}. Use another "
            f"checkpoint."
        )
