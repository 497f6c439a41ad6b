"""The folder of checkpoints: find, link and delete them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from bisect import bisect
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Final

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.manifest import MANIFEST, STATE, is_file_name, read_manifest
from modelzoo_trainer.checkpointing.stores.deleting import forget
from modelzoo_trainer.errors import CheckpointError, NewerFormat, folder_reason

log = logging.getLogger("modelzoo_trainer.checkpointing")

LATEST: Final = "latest"
_LEFTOVER: Final = re.compile(r"\.(tmp|trash)-.+-[0-9a-f]{8}")
_MAX_NAME_BYTES: Final = 255  # of a file name, on any common file system
_MAX_STEP: Final = 2**63 - 1
_MAX_NUMBER: Final = 9999  # checkpoints of one step
_PID_DIGITS: Final = 10
_WRITER: Final = re.compile(r".*-(\d+)-[0-9a-f]{8}")


def hidden_name(kind: str, name: str) -> str:
    """Return a name unique to this process, hidden from readers of `name`.

    `kind`: "tmp" = being written; "trash" = being deleted.
    """
    return f".{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def name_problem(template: Any) -> str | None:
    """Return why checkpoints with this name could not be found again; None = valid.

    `template`: with the field `{step}`.
    """
    if not isinstance(template, str) or _fields_of(template) != [("step", "", None)]:
        return "expected a file name with the field {step} once"
    if template.startswith("."):
        return "names that start with a dot are hidden and ignored"
    if "/" in template or "\\" in template or not template.isprintable():
        return "path separators and unprintable characters are not allowed"
    longest = hidden_name("trash", f"{template.format(step=_MAX_STEP)}_{_MAX_NUMBER}")
    num_bytes = len(longest.encode()) - len(str(os.getpid())) + _PID_DIGITS
    if num_bytes > _MAX_NAME_BYTES:
        over = num_bytes - _MAX_NAME_BYTES
        return f"it is too long for a file name (bytes over the limit: {over})"
    if name_pattern(template).fullmatch(template.format(step=7)) is None:
        return "no braces other than in {step} are allowed"
    return None


def name_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern for names of checkpoints, including those with a number after the step.

    `template`: with the field `{step}`.
    """
    before, after = template.split("{step}")
    return re.compile(rf"{re.escape(before)}\d+{re.escape(after)}(_\d+)?")


def _fields_of(name: str) -> list[tuple[str | None, str | None, str | None]]:
    """Return name, format and conversion of each field; empty if it is not a format string."""
    try:
        return [tuple(part[1:]) for part in Formatter().parse(name) if part[1] is not None]  # type: ignore[misc]  # drop the literal text
    except ValueError:
        return []


def delete(path: Path) -> None:
    """Delete a checkpoint, damaged or not, atomically.

    Raises:
        CheckpointError: If it is a link, contains other files, has `..` in its path, or the disk
            fails.
    """
    problem = _foreign(path)
    if problem is not None:
        raise CheckpointError(f"{str(path)!r} was not deleted: it {problem}.")
    trash = path.with_name(hidden_name("trash", path.name))
    try:
        forget(path)
        disk.rename(path, trash)
        disk.sync_folder(path.parent)
        disk.remove_tree(trash)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {str(path)!r} could not be deleted: {error.strerror or error}."
        ) from error


def _foreign(path: Path) -> str | None:
    """Return why a path is not a checkpoint that may be deleted."""
    if ".." in path.parts or not path.name:
        return "has `..` in its path or no name"
    if path.is_symlink():
        return f"is a symbolic link to {os.readlink(path)!r}"
    if not path.is_dir():
        return "is not a directory" if path.exists() else "does not exist"
    names = sorted(entry.name for entry in path.iterdir())
    strange = [name for name in names if not is_file_name(name) or (path / name).is_dir()]
    if strange:
        name = strange[0]
        return f"contains {name!r}, which is not part of a checkpoint; delete or move {name!r}"
    if MANIFEST not in names and STATE not in names:
        return f"has neither {MANIFEST} nor {STATE}, so it is not a checkpoint"
    return None


def clean(folder: Path) -> list[Path]:
    """Remove leftovers of interrupted writers from a folder, and return their paths.

    Leaves files of running processes alone.

    No other machine may be writing checkpoints into the folder.
    """
    removed = []
    for path in _leftovers(folder):
        try:
            if path.is_dir() and not path.is_symlink():
                disk.remove_tree(path)
            else:
                disk.unlink(path)
        except OSError as error:
            text = "failed to remove %s, left over from an interrupted save or deletion: %s"
            log.warning(text, path, error)
        else:
            removed.append(path)
    return removed


def _leftovers(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in paths if _LEFTOVER.fullmatch(path.name) and not _is_in_use(path.name)]


def _is_in_use(name: str) -> bool:
    """Return whether the process in a name is another one that is running."""
    found = _WRITER.fullmatch(name)
    if found is None or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def probe(folder: Path) -> None:
    """Create a folder, and check that files can be written and renamed in it.

    Raises:
        CheckpointError: If that fails.
    """
    file = folder / hidden_name("tmp", "probe")
    renamed = folder / hidden_name("trash", "probe")
    try:
        disk.make_folder(folder)
        try:
            fd = disk.open_new(file)
            try:
                disk.write(fd, b"probe")
                disk.sync(fd)
            finally:
                disk.close(fd)
            disk.rename(file, renamed)
        finally:
            with suppress(OSError):
                disk.unlink(file)
                disk.unlink(renamed)
    except OSError as error:
        raise CheckpointError(
            f"The folder {str(folder)!r} is not writable: {folder_reason(folder, error)}. "
            f"Check permissions and free disk space."
        ) from error


def mend_latest(folder: Path, name: str | None) -> None:
    """Point the link `latest` at a checkpoint if it points elsewhere, such as after a crash.

    `name`: of the newest checkpoint; None = none, so remove a dangling link.
    """
    link = folder / LATEST
    try:
        if name is None:
            if link.is_symlink() and not link.exists():
                disk.unlink(link)
        elif not (link.is_symlink() and os.readlink(link) == name):
            point_latest(folder, name)
    except OSError as error:
        log.debug("failed to update %s: %s", link, error)


def point_latest(folder: Path, name: str) -> None:
    """Point the link `latest` at a checkpoint, for users; the code never reads it."""
    place, link = folder / LATEST, folder / hidden_name("tmp", LATEST)
    try:
        if place.is_symlink() or not place.exists():
            disk.link(link, name)
            disk.rename(link, place)
    except OSError as error:
        log.debug("failed to point %s at %s: %s", place, name, error)
        with suppress(OSError):
            disk.unlink(link)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint."""

    path: Path
    step: int


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return the committed checkpoints of a folder, oldest first: by step, then by name.

    Directories without a readable manifest are ignored; a missing folder has none.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    return _split(_visible(folder))[0]


def newest(folder: Path, pattern: re.Pattern[str]) -> Path | None:
    """Return the newest checkpoint of a folder whose full name matches `pattern`, or None."""
    fitting = [info for info in list_checkpoints(folder) if pattern.fullmatch(info.path.name)]
    return fitting[-1].path if fitting else None


def candidates(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return possible newest checkpoints, the most likely first.

    Unlike `list_checkpoints`, includes directories with an unreadable manifest, sorted by name,
    so that callers can report that they skip them.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    paths = [path for path in _named(folder) if pattern.fullmatch(path.name)]
    readable, unreadable = _split(paths)
    found = [info.path for info in readable]
    for path in sorted(unreadable, key=lambda path: natural(path.name)):
        found.insert(bisect([natural(other.name) for other in found], natural(path.name)), path)
    return found[::-1]


def refuse_newer(path: Path) -> None:
    """Check that a checkpoint is not of a newer format, which is no reason to skip it.

    Raises:
        NewerFormat: If it is.
    """
    try:
        read_manifest(path)
    except NewerFormat as error:
        raise NewerFormat(
            f"{error} To use an older checkpoint instead, pass its path as ckpt_path; to start "
            f"from scratch, use a new model_dir."
        ) from None
    except CheckpointError:
        pass  # reported by those who read it


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
            f"The folder {str(folder)!r} cannot be listed: {error.strerror or error}."
        ) from error


def _split(paths: list[Path]) -> tuple[list[CheckpointInfo], list[Path]]:
    """Return the committed checkpoints in order, and the other directories."""
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


def free_bytes(folder: Path) -> int | None:
    """Return how many bytes this user may write to a folder's disk; None = unknown.

    Uses the nearest existing parent folder.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None
