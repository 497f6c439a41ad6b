"""Which text files a corpus has, and which of them are for validation."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from modelzoo_trainer.errors import ConfigError

Split = Literal["train", "val", "all"]

STDLIB: Final = "stdlib"
"""As `data_dir`: the library of the running Python."""

_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_DEFAULT_PATTERN: Final = "**/*.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text file of a corpus.

    Args:
        path: Where it is.
        name: Its path below the folder it was found in, with `/`; it decides the split, so that
            a corpus is split alike wherever it lies.
    """

    path: Path
    name: str

    @property
    def fraction(self) -> float:
        """A number between 0 and 1 that the name determines, evenly spread over names."""
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def find_documents(data_dir: str | Sequence[str], pattern: str | None) -> list[Document]:
    """Return the documents of a corpus, each file once, in an order that names determine.

    Args:
        data_dir: Folders, files, glob patterns, or `stdlib`; one or several.
        pattern: Which files of a folder, as a glob; not given, `**/*.txt`. Of `stdlib` it is
            always the Python files, without tests and installed packages.

    Raises:
        ConfigError: If a folder is missing, or no file is found.
    """
    places = [data_dir] if isinstance(data_dir, str) else list(data_dir)
    found = [document for place in places for document in _find(place, pattern)]
    if not found:
        raise ConfigError(
            f"data_dir {data_dir!r} has no file that matches pattern "
            f"{pattern or _DEFAULT_PATTERN!r}. Set pattern to what the files are called, "
            "for example '**/*.md'."
        )
    if len(places) > 1:
        found = list({document.path.resolve(): document for document in reversed(found)}.values())
    return sorted(found, key=lambda document: (document.fraction, document.name))


def split_documents(
    documents: Iterable[Document], split: Split, val_fraction: float
) -> list[Document]:
    """Return the documents of one split; adding a document moves no other.

    Args:
        documents: Of the whole corpus.
        split: Which ones.
        val_fraction: Expected share of documents in `val`.

    Raises:
        ConfigError: If there are none.
    """
    documents = list(documents)
    if split == "all":
        return documents
    chosen = [
        document for document in documents if (document.fraction < val_fraction) == (split == "val")
    ]
    if not chosen:
        raise ConfigError(
            f"split {split!r} has no document: all {len(documents)} are on the other side of "
            f"val_fraction {val_fraction}. Change val_fraction, or give data_dir more files."
        )
    return chosen


def _find(place: str, pattern: str | None) -> list[Document]:
    if place == STDLIB:
        return _library(Path(sysconfig.get_path("stdlib")))
    path = Path(place).expanduser()
    if path.is_dir():
        matches = (match for match in path.glob(pattern or _DEFAULT_PATTERN) if match.is_file())
        return [_below(path, match) for match in matches]
    if path.is_file():
        return [Document(path=path, name=path.name)]
    if glob.has_magic(place):
        found = (Path(match) for match in glob.glob(str(path), recursive=True))
        return [Document(path=match, name=match.name) for match in found if match.is_file()]
    raise ConfigError(_missing(place))


def missing_places(data_dir: str | Sequence[str]) -> list[str]:
    """Return a sentence for each place of a corpus that is not there; no folder is read.

    Args:
        data_dir: As in `find_documents`.
    """
    places = [data_dir] if isinstance(data_dir, str) else data_dir
    return [
        _missing(place)
        for place in places
        if place != STDLIB and not glob.has_magic(place) and not Path(place).expanduser().exists()
    ]


def _missing(place: str) -> str:
    return (
        f"data_dir {place!r} does not exist. Give a folder, a file, a glob pattern, or "
        f"{STDLIB!r} for the library of the running Python."
    )


def _library(root: Path) -> list[Document]:
    found = []
    for folder, subfolders, files in os.walk(root):
        # In place, so that the many installed packages are not even looked at.
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found += [_below(root, Path(folder, name)) for name in files if name.endswith(".py")]
    return found


def _below(root: Path, path: Path) -> Document:
    return Document(path=path, name=path.relative_to(root).as_posix())
