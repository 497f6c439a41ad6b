"""Which images lie in the folders of classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.stream_processor import say_once

ENDINGS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of files that are images; in any case."""
_DIGEST_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class FileKind:
    """What the files of a class are.

    Args:
        one: A file, in messages.
        several: Files, in messages.
        place: Stands for the name of a file, in messages.
        endings: Of their names; in any case.
        setting: Name of the setting of the folder, in messages.
    """

    one: str
    several: str
    place: str
    endings: tuple[str, ...]
    setting: str = "data_dir"


IMAGES: Final = FileKind("an image", "images", "IMAGE", ENDINGS)


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images of a folder with a folder for each class.

    The names are kept as one text: a string for each would take several times as much memory, which
    each worker would copy.

    Args:
        folder: Of the classes.
        classes: Names of the folders of `train`, else of this one, sorted; label i is class i.
        names: All names after each other, UTF-8, relative to the folder, `/` between folders.
        ends: Where each name ends in `names`, in bytes.
        labels: The class of each image.
    """

    folder: str
    classes: tuple[str, ...]
    names: bytes
    ends: NDArray[np.int64]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        """Return the path of an image."""
        start = int(self.ends[index - 1]) if index else 0
        name = os.fsdecode(self.names[start : int(self.ends[index])])
        return os.path.join(self.folder, *name.split("/"))

    @property
    def fingerprint(self) -> int:
        """A number that changes with the names of classes and images."""
        digest = hashlib.sha256(repr(self.classes).encode())
        digest.update(self.names)
        digest.update(self.ends.tobytes())
        return int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big")


def missing_folder(data_dir: str, split: str, kind: FileKind = IMAGES) -> list[str]:
    """Return a message if the folder of a split cannot be read now; nothing is opened."""
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / split):
        if not folder.is_dir():
            shown = data_dir if folder.name != split else os.path.join(data_dir, split)
            problem = "is not a folder" if folder.exists() else "does not exist"
            return [
                f"{kind.setting} {shown!r} {problem}. Give a folder with train/CLASS/{kind.place} "
                f"and val/CLASS/{kind.place}."
            ]
    return []


def find_images(data_dir: str, split: str, kind: FileKind = IMAGES) -> ImageFiles:
    """Return the files in `data_dir/split/CLASS`, and in folders inside it, sorted by name.

    Classes are numbered by the folders of `train`, if it exists, for all splits. Names that begin
    with a dot are left out.

    Raises:
        ConfigError: If a folder is missing, cannot be listed or contains itself by a link, or a
            class has no image or is none of `train`.
    """
    if problems := missing_folder(data_dir, split, kind):
        raise ConfigError(problems[0])
    above = os.path.expanduser(data_dir)
    folder, train = os.path.join(above, split), os.path.join(above, "train")
    found = classes = _classes(folder, kind)
    if split != "train" and os.path.isdir(train):
        classes = _classes(train, kind)
        if lacking := sorted({*found} - {*classes}):
            raise ConfigError(
                f"{os.path.join(folder, lacking[0])}: {len(lacking)} of {len(found)} classes have "
                f"no folder in {train!r}, which gives classes their labels. Use the same names."
            )
    names: list[bytes] = []
    counts = dict.fromkeys(classes, 0)
    others: list[str] = []
    for name in found:
        images = [os.fsencode(one) for one in _images(folder, (name,), others, kind)]
        if not images:
            raise ConfigError(
                f"{os.path.join(folder, name)}: a class without {kind.one}. Remove the folder, "
                f"or add {kind.several} ({', '.join(kind.endings)})."
            )
        names += images
        counts[name] = len(images)
    if others:
        say_once(
            f"{kind.setting} {folder!r}: {len(others)} files are left out, as their names do not "
            f"end like names of {kind.several}, such as {min(others)!r}."
        )
    return ImageFiles(
        folder,
        tuple(classes),
        b"".join(names),
        np.cumsum([len(one) for one in names], dtype=np.int64),
        np.repeat(np.arange(len(classes), dtype=np.int32), list(counts.values())),
    )


def _classes(folder: str, kind: FileKind) -> list[str]:
    """Return the names of the classes of a split, sorted."""
    classes, _ = _entries(folder)
    if not classes:
        raise ConfigError(
            f"{kind.setting} {folder!r} has no folder, but each class requires one with its "
            f"{kind.several}. Give the folder above train and val."
        )
    return classes


def _images(
    folder: str,
    parts: tuple[str, ...],
    others: list[str],
    kind: FileKind,
    above: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[str]:
    """Yield the names of the images in a folder of a class; names of other files are added.

    Args:
        folder: Of the split.
        parts: The names of the folders below it, down to this one.
        others: The names of other files.
        kind: Of the files to find.
        above: Device and inode of the folders above.
    """
    place = os.path.join(folder, *parts)
    inside, files = _entries(place)
    status = os.stat(place)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise ConfigError(
            f"{place}: the folder is a link to one that it lies in, so that it contains itself. "
            f"Remove the link."
        )
    for file in files:
        if file.lower().endswith(kind.endings):
            yield "/".join([*parts, file])
        else:
            others.append("/".join([*parts, file]))
    for name in inside:
        yield from _images(folder, (*parts, name), others, kind, above | {identity})


def _entries(place: str) -> tuple[list[str], list[str]]:
    """Return the names of folders and of files, sorted, without those that begin with a dot."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(place) as entries:
            for one in entries:
                if not one.name.startswith("."):
                    (folders if one.is_dir() else files).append(one.name)
    except OSError as error:
        raise ConfigError(f"{place}: the folder cannot be listed: {reason_of(error)}.") from error
    return sorted(folders), sorted(files)
