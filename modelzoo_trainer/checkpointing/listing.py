"""Finding checkpoints in a folder."""

from __future__ import annotations

import re
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

from modelzoo_trainer.checkpointing.manifest import read_manifest
from modelzoo_trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint.

    Args:
        path: Its directory.
        step: Its global step, as the manifest says.
    """

    path: Path
    step: int


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return the committed checkpoints of a folder, oldest first: by step, then by name.

    Directories without a readable manifest are left out; a folder that does not exist has none.

    Args:
        folder: Where to look.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    return _split(_visible(folder))[0]


def newest(folder: Path, pattern: re.Pattern[str]) -> Path | None:
    """Return the newest checkpoint of a folder whose whole name fits `pattern`, or None."""
    fitting = [info for info in list_checkpoints(folder) if pattern.fullmatch(info.path.name)]
    return fitting[-1].path if fitting else None


def candidates(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return what may be the newest intact checkpoint, the most promising first.

    Unlike in `list_checkpoints`, a directory whose manifest cannot be read is among them: who
    passes it over can say so. It stands where its name would stand.

    Args:
        folder: Where to look.
        pattern: What a whole name must fit.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    paths = [path for path in _named(folder) if pattern.fullmatch(path.name)]
    readable, unreadable = _split(paths)
    found = [info.path for info in readable]
    for path in sorted(unreadable, key=lambda path: natural(path.name)):
        found.insert(bisect([natural(other.name) for other in found], natural(path.name)), path)
    return found[::-1]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts checkpoint_100_2 after checkpoint_100 and before checkpoint_100_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _visible(folder: Path) -> list[Path]:
    return [path for path in _named(folder) if not path.is_symlink()]


def _named(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"the folder {str(folder)!r} cannot be listed: {error.strerror or error}."
        ) from error


def _split(paths: list[Path]) -> tuple[list[CheckpointInfo], list[Path]]:
    """Return the committed checkpoints in order, and the directories that are none."""
    readable, unreadable = [], []
    for path in paths:
        try:
            step = read_manifest(path).step
        except CheckpointError:
            if path.is_dir() or path.is_symlink():
                unreadable.append(path)
        else:
            readable.append(CheckpointInfo(path=path, step=step))
    return sorted(readable, key=lambda info: (info.step, natural(info.path.name))), unreadable
