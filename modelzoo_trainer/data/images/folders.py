"""Which images lie in the folders of classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.data.stream_processor import say_once
from modelzoo_trainer.errors import ConfigError, reason_of

ENDINGS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of files that are images; in any case."""
_DIGEST_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images of a folder with a folder for each class.

    The names are kept as one text: a string for each would take several times as much memory, which
    each worker would copy.

    Args:
        folder: Of the classes.
        classes: Names of their folders, sorted; label i is class i.
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


def missing_folder(data_dir: str, split: str) -> list[str]:
    """Return a message if the folder of a split cannot be read now; nothing is opened."""
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / split):
        if not folder.is_dir():
            shown = data_dir if folder.name != split else os.path.join(data_dir, split)
            problem = "is not a folder" if folder.exists() else "does not exist"
            return [
                f"data_dir {shown!r} {problem}. Give a folder with train/CLASS/IMAGE and "
                f"val/CLASS/IMAGE."
            ]
    return []


def find_images(data_dir: str, split: str) -> ImageFiles:
    """Return the images in `data_dir/split/CLASS`, and in folders inside it, sorted by name.

    Raises:
        ConfigError: If a folder is missing or cannot be listed, or a class has no image.
    """
    if problems := missing_folder(data_dir, split):
        raise ConfigError(problems[0])
    folder = os.path.join(os.path.expanduser(data_dir), split)
    try:
        with os.scandir(folder) as entries:
            classes = sorted(one.name for one in entries if one.is_dir())
    except OSError as error:
        raise ConfigError(f"data_dir {folder!r} cannot be listed: {reason_of(error)}.") from error
    if not classes:
        raise ConfigError(
            f"data_dir {folder!r} has no folder, but each class requires one with its images. Give "
            f"the folder above train and val."
        )
    names: list[bytes] = []
    counts = []
    others: list[str] = []
    for name in classes:
        found = [os.fsencode(one) for one in _images(folder, name, others)]
        if not found:
            raise ConfigError(
                f"{os.path.join(folder, name)}: a class without an image. Remove the folder, or "
                f"add images ({', '.join(ENDINGS)})."
            )
        names += found
        counts.append(len(found))
    if others:
        say_once(
            f"data_dir {folder!r}: {len(others)} files are left out, as their names do not end as "
            f"those of images, such as {min(others)!r}."
        )
    return ImageFiles(
        folder,
        tuple(classes),
        b"".join(names),
        np.cumsum([len(one) for one in names], dtype=np.int64),
        np.repeat(np.arange(len(classes), dtype=np.int32), counts),
    )


def _images(folder: str, name: str, others: list[str]) -> Iterator[str]:
    """Yield the names of the images of a class; those of other files are added to `others`."""
    top = os.path.join(folder, name)
    for place, inside, files in os.walk(top, onerror=_cannot_list, followlinks=True):
        inside.sort()
        relative = [name, *_parts(os.path.relpath(place, top))]
        for file in sorted(files):
            if file.lower().endswith(ENDINGS):
                yield "/".join([*relative, file])
            elif not file.startswith("."):
                others.append("/".join([*relative, file]))


def _parts(relative: str) -> Sequence[str]:
    return () if relative == os.curdir else relative.split(os.sep)


def _cannot_list(error: OSError) -> None:
    raise ConfigError(f"{error.filename}: the folder cannot be listed: {reason_of(error)}.")
