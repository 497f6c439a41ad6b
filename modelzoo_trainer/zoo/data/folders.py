"""Folders of data, and the files that `meta.dat` in a folder lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from modelzoo_trainer.errors import ConfigError, reason_of

META: Final = "meta.dat"


class MetaLine(NamedTuple):
    """A line of `meta.dat`.

    Args:
        names: The names of files, as they are written.
        num_rows: The number of their rows, or lines.
        place: The file and the number of the line, for messages.
    """

    names: tuple[str, ...]
    num_rows: int
    place: str


def distinct_folders(given: object, where: str, advice: str = "Remove one.") -> tuple[str, ...]:
    """Return the folders that an argument names, one or several.

    Args:
        given: Its value.
        where: Its name.
        advice: What to do if two are the same.

    Raises:
        ConfigError: If it names none, or one twice.
    """
    folders = [given] if isinstance(given, str) else given
    if (
        not isinstance(folders, Sequence)
        or not folders
        or not all(isinstance(one, str) and one and "\0" not in one for one in folders)
    ):
        raise ConfigError(f"{where}: expected a folder or a list of folders, got {given!r}.")
    names: tuple[str, ...] = tuple(folders)
    seen: dict[str, str] = {}
    for name in names:
        real = real_path(name)
        if real in seen:
            raise ConfigError(
                f"{where}: {name!r} and {seen[real]!r} are the same folder, whose samples would "
                f"be used twice. {advice}"
            )
        seen[real] = name
    return names


def read_meta(folder: str, num_names: int, argument: str) -> list[MetaLine]:
    """Return the lines of `meta.dat` of a folder, without the empty ones.

    Words are separated by blanks or tabs; one name may have some inside, of several none may.

    Args:
        folder: The folder.
        num_names: Names of files in a line, before the number.
        argument: What names the folder, for messages.

    Raises:
        ConfigError: If it cannot be read, names no file, or a line has another form.
    """
    path = Path(folder).expanduser() / META
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{argument} {folder!r}: {META} cannot be read: {reason_of(error)}. The folder must "
            f"have this file, with a line for each {'file' if num_names == 1 else 'pair of files'}"
            f": {'its name' if num_names == 1 else 'the names'}, and the number of rows."
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.strip().rsplit(None, 1) if num_names == 1 else line.split()
        if not words:
            continue
        if len(words) != num_names + 1 or not words[-1].isdecimal():
            expected = "a file name" if num_names == 1 else f"{num_names} file names"
            raise ConfigError(f"{path}:{number}: expected {expected} and a number, got {line!r}.")
        found.append(MetaLine(tuple(words[:-1]), int(words[-1]), f"{path}:{number}"))
    if not found:
        raise ConfigError(f"{path} names no file, so it lists no rows. Add data.")
    return found


class NamedFiles:
    """The files that lists have named: each is to be named once."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], str] = {}

    def add(self, paths: Sequence[str], place: str) -> None:
        """Add the files of a line.

        Raises:
            ConfigError: If another line has the same files; with the places of both.
        """
        before = self._places.setdefault(tuple(real_path(one) for one in paths), place)
        if before != place:
            raise ConfigError(
                f"{place}: {before} lists {' and '.join(paths)} too, whose samples would be used "
                f"twice. Remove one of the lines."
            )


def real_path(path: str) -> str:
    """Return a path without links, by which two names of a file can be compared."""
    return os.path.realpath(os.path.expanduser(path))
