"""Readable summaries of checkpoints: one line each, or details of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Final

from modelzoo_trainer.checkpointing.checked_file import checked_json, open_checked, record_of_name
from modelzoo_trainer.checkpointing.folder import natural
from modelzoo_trainer.checkpointing.manifest import (
    MANIFEST,
    STATE,
    SUFFIX,
    Manifest,
    listing_problems,
    read_manifest,
)
from modelzoo_trainer.checkpointing.shard_index import SHARDS, ShardIndex, parse_index
from modelzoo_trainer.checkpointing.stores.reading import complete, is_in_mirror
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, read_header
from modelzoo_trainer.errors import CheckpointError

_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")


def readable(num_bytes: int) -> str:
    """Format a number of bytes with a unit, such as "12.3 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power = 1
    while num_bytes / 1000**power >= 999.95 and power < len(_UNITS):
        power += 1
    return f"{num_bytes / 1000**power:.1f} {_UNITS[power - 1]}"


_NUM_BYTES = dict(DTYPES.values()) | {"complex128": 16}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor."""

    # the file's name without suffix, and the tensor's name in it; the full name for a checkpoint
    # written by several ranks
    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]  # complex numbers in a file have one more dimension, of 2
    num_bytes: int


def tensor_table(path: Path, manifest: Manifest) -> list[TensorRow]:
    """Return the tensors of a checkpoint.

    Raises:
        CheckpointError: If a header cannot be read.

    Cost: Reads headers only, without verifying them.
    """
    if SHARDS in manifest.files:
        index = parse_index(checked_json(path / SHARDS, record_of_name(manifest.files, SHARDS)))
        return _sharded_rows(index)
    rows = []
    complete(path, manifest.files)
    for file in sorted(name for name in manifest.files if name.endswith(SUFFIX)):
        with open_checked(path / file, manifest.files[file]) as opened:
            header = read_header(opened, opened.size)
        for name, entry in header.tensors.items():
            full = f"{file.removesuffix(SUFFIX)}.{name}"
            rows.append(TensorRow(full, entry.dtype, entry.shape, entry.num_bytes))
    return sorted(rows, key=lambda row: row.name)


def _sharded_rows(index: ShardIndex) -> list[TensorRow]:
    rows = []
    for name, tensor in sorted(index.tensors.items()):
        if tensor.dtype not in _NUM_BYTES:
            raise CheckpointError(
                f"{SHARDS!r} has the unknown dtype {tensor.dtype!r} for {name!r}. Use the version "
                f"of modelzoo_trainer that saved the checkpoint."
            )
        num_bytes = prod(tensor.shape) * _NUM_BYTES[tensor.dtype]
        rows.append(TensorRow(name, tensor.dtype, tensor.shape, num_bytes))
    return rows


_LEFTOVERS: Final = {
    ".tmp-": "uncommitted: being written, or left by a killed process",
    ".trash-": "partly deleted: left by a killed process",
}
_MARKS: Final = (MANIFEST, STATE, SHARDS)  # a checkpoint has at least one of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Summary of a directory, without reading its files."""

    path: Path
    num_bytes: int
    step: int | None = None  # None = not known
    written: datetime | None = None  # local time; None = not known
    problems: tuple[str, ...] = ()  # empty = none found
    is_leftover: bool = False  # left by an interrupted process, not a checkpoint
    is_verified: bool = False  # all files were read

    @property
    def is_intact(self) -> bool:
        """Return whether it is a checkpoint without known problems."""
        return not self.problems and not self.is_leftover

    @property
    def is_damaged(self) -> bool:
        """Return whether it is a checkpoint that cannot be used."""
        return bool(self.problems) and not self.is_leftover

    def verified(self, problems: list[str]) -> Overview:
        """Return a copy with the result of reading all files."""
        if self.is_leftover:
            return self
        return replace(self, problems=tuple(problems), is_verified=True)

    def verdict(self) -> str:
        """Return in words whether it can be used."""
        if self.problems:
            return "; ".join(self.problems)
        return "intact" if self.is_verified else "complete"


def overview(path: Path) -> Overview:
    """Summarize a directory, reading only its manifest."""
    for prefix, what in _LEFTOVERS.items():
        if path.name.startswith(prefix):
            size = _num_bytes(path)
            return Overview(path=path, num_bytes=size, problems=(what,), is_leftover=True)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = str(error).removesuffix(".")
        return Overview(path=path, num_bytes=_num_bytes(path), problems=(problem,))
    num_bytes = _num_bytes(path)
    if is_in_mirror(path):  # files that are not here, too
        listed = sum(record.size_bytes for record in manifest.files.values())
        num_bytes = max(num_bytes, listed + (path / MANIFEST).stat().st_size)
    return Overview(
        path=path,
        step=manifest.step,
        num_bytes=num_bytes,
        written=_written(path),
        problems=tuple(listing_problems(path, manifest)),
    )


def find_checkpoints(folder: Path) -> list[Overview]:
    """Return checkpoints and leftovers of a folder, the oldest step first.

    Raises:
        OSError: If it cannot be listed.
    """
    if is_meant_as_one(folder):
        return [overview(folder)]
    paths = [path for path in folder.iterdir() if not path.is_symlink() and path.is_dir()]
    found = [overview(path) for path in paths if is_meant_as_one(path)]
    return sorted(found, key=_order)


def _order(item: Overview) -> tuple[bool, int, list[tuple[int, str]]]:
    return item.step is None, item.step or 0, natural(item.path.name)


def is_meant_as_one(path: Path) -> bool:
    """Return whether a directory is a checkpoint, complete or not."""
    return path.name.startswith(tuple(_LEFTOVERS)) or any((path / name).exists() for name in _MARKS)


def _num_bytes(path: Path) -> int:
    try:
        return sum(entry.lstat().st_size for entry in path.iterdir())
    except OSError:  # it may be deleted at the same time
        return 0


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp((path / MANIFEST).stat().st_mtime).astimezone()
    except OSError:
        return None


def table(found: list[Overview]) -> list[str]:
    """Format checkpoints as a table with a header."""
    rows = [("name", "step", "size", "written", "state")]
    for item in found:
        when = f"{item.written:%Y-%m-%d %H:%M:%S}" if item.written else "-"
        step = "-" if item.step is None else str(item.step)
        rows.append((item.path.name, step, readable(item.num_bytes), when, item.verdict()))
    return _aligned(rows, right={1, 2})


def _aligned(rows: Sequence[tuple[str, ...]], right: set[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if idx in right else cell.ljust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def details(path: Path) -> list[str]:
    """Return the details of a checkpoint as lines.

    Raises:
        CheckpointError: If its manifest cannot be read.
    """
    manifest = read_manifest(path)
    rows = _rows(path, manifest)
    item = overview(path)
    pairs = [
        ("path", str(path)),
        ("step", str(manifest.step)),
        ("format", str(manifest.format_version)),
        ("written", f"{item.written:%Y-%m-%d %H:%M:%S}" if item.written else "-"),
        ("size", f"{readable(item.num_bytes)} in {len(manifest.files) + 1} files"),
        ("versions", ", ".join(f"{name} {text}" for name, text in manifest.versions.items())),
    ]
    pairs += [(f"fact {name}", json.dumps(fact)) for name, fact in manifest.facts.items()]
    total = sum(row.num_bytes for row in rows)
    pairs.append(("tensors", f"{len(rows)}, {readable(total)}"))
    lines = _aligned(pairs, right=set())
    if rows:
        cells = [("tensor", "dtype", "shape", "size")]
        cells += [
            (row.name, row.dtype, str(list(row.shape)), readable(row.num_bytes)) for row in rows
        ]
        lines += ["", *_aligned(cells, right={3})]
    return lines


def details_json(path: Path) -> list[str]:
    """Return the details of a checkpoint as lines of JSON.

    Raises:
        CheckpointError: If its manifest cannot be read.
    """
    manifest = read_manifest(path)
    item = overview(path)
    found = {
        "path": str(path),
        "step": manifest.step,
        "format_version": manifest.format_version,
        "written": item.written.isoformat(timespec="seconds") if item.written else None,
        "num_bytes": item.num_bytes,
        "problems": list(item.problems),
        "versions": manifest.versions,
        "facts": manifest.facts,
        "files": {name: record.size_bytes for name, record in manifest.files.items()},
        "tensors": [
            {
                "name": row.name,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "num_bytes": row.num_bytes,
            }
            for row in _rows(path, manifest)
        ],
    }
    return json.dumps(found, indent=1).splitlines()


def _rows(path: Path, manifest: Manifest) -> list[TensorRow]:
    """Return the tensors; empty if files of the checkpoint are missing."""
    return [] if listing_problems(path, manifest) else tensor_table(path, manifest)
