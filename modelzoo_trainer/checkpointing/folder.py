"""The folder of checkpoints: what is removed from it, whether it can be written, its pointer."""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.manifest import MANIFEST, STATE, is_file_name
from modelzoo_trainer.errors import CheckpointError

log = logging.getLogger("modelzoo_trainer.checkpointing")

LATEST: Final = "latest"
_LEFTOVER: Final = re.compile(r"\.(tmp|trash)-.+-[0-9a-f]{8}")
_WRITER: Final = re.compile(r".*-(\d+)-[0-9a-f]{8}")


def hidden_name(kind: str, name: str) -> str:
    """Return a name of this process's own, for what is not to be seen as `name`.

    Args:
        kind: "tmp" = being made; "trash" = being removed.
        name: What it will be, or was.
    """
    return f".{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def delete(path: Path) -> None:
    """Remove a checkpoint, damaged or not; from the first moment on it is whole or not there.

    Args:
        path: Its directory.

    Raises:
        CheckpointError: If it is a link, has something in it that is not a checkpoint's, leads
            through `..`, or the disk refuses.
    """
    problem = _foreign(path)
    if problem is not None:
        raise CheckpointError(f"{str(path)!r} is not deleted: it {problem}.")
    trash = path.with_name(hidden_name("trash", path.name))
    try:
        disk.rename(path, trash)
        disk.sync_folder(path.parent)
        disk.remove_tree(trash)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} could not be deleted: {error.strerror or error}."
        ) from error


def _foreign(path: Path) -> str | None:
    """Return why a path is not a checkpoint that may be removed."""
    if ".." in path.parts or not path.name:
        return "may lead elsewhere"
    if path.is_symlink():
        return f"is a symbolic link to {os.readlink(path)!r}"
    if not path.is_dir():
        return "is no directory" if path.exists() else "is not there"
    names = sorted(entry.name for entry in path.iterdir())
    strange = [name for name in names if not is_file_name(name) or (path / name).is_dir()]
    if strange:
        return f"has {strange[0]!r}, which is no file of a checkpoint; remove it by hand"
    if MANIFEST not in names and STATE not in names:
        return f"has neither {MANIFEST} nor {STATE}, so it is no checkpoint"
    return None


def clean(folder: Path) -> list[Path]:
    """Remove what interrupted writers have left in a folder, and return what it was.

    What a process that lives may be writing is left alone.

    Args:
        folder: Nobody else may be writing checkpoints into it from another machine.
    """
    removed = []
    for path in _leftovers(folder):
        try:
            if path.is_dir() and not path.is_symlink():
                disk.remove_tree(path)
            else:
                disk.unlink(path)
        except OSError as error:
            log.warning("%s is left over and cannot be removed: %s", path, error)
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
    """Return whether the process in a name is another one that lives."""
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
    """Make a folder, and make sure that files can be written and renamed in it.

    Args:
        folder: Where checkpoints will be.

    Raises:
        CheckpointError: If they cannot.
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
            f"nothing can be written in {str(folder)!r}: {error.strerror or error}."
        ) from error


def mend_latest(folder: Path, name: str | None) -> None:
    """Point the link `latest` at a checkpoint if it leads elsewhere, as after a crash.

    Args:
        folder: The checkpoint's folder.
        name: The newest checkpoint's name; None = there is none: a link that leads nowhere goes.
    """
    link = folder / LATEST
    try:
        if name is None:
            if link.is_symlink() and not link.exists():
                disk.unlink(link)
        elif not (link.is_symlink() and os.readlink(link) == name):
            point_latest(folder, name)
    except OSError as error:
        log.debug("%s cannot be corrected: %s", link, error)


def point_latest(folder: Path, name: str) -> None:
    """Point the link `latest` at a checkpoint, for people; nothing here ever reads it.

    Args:
        folder: The checkpoint's folder.
        name: The checkpoint's name.
    """
    place, link = folder / LATEST, folder / hidden_name("tmp", LATEST)
    try:
        if place.is_symlink() or not place.exists():
            disk.link(link, name)
            disk.rename(link, place)
    except OSError as error:
        log.debug("%s does not point at %s: %s", place, name, error)
        with suppress(OSError):
            disk.unlink(link)
