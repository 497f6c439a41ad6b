"""Finding checkpoints in a folder."""

from __future__ import annotations

import re
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
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"the folder {str(folder)!r} cannot be listed: {error.strerror or error}."
        ) from error
    found = []
    for path in paths:
        if not path.is_symlink():
            try:
                step = read_manifest(path).step
            except CheckpointError:
                continue
            found.append(CheckpointInfo(path=path, step=step))
    return sorted(found, key=lambda info: (info.step, _natural(info.path.name)))


def newest(folder: Path, pattern: re.Pattern[str]) -> Path | None:
    """Return the newest checkpoint of a folder whose whole name fits `pattern`, or None."""
    fitting = [info for info in list_checkpoints(folder) if pattern.fullmatch(info.path.name)]
    return fitting[-1].path if fitting else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts checkpoint_100_2 after checkpoint_100 and before checkpoint_100_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
