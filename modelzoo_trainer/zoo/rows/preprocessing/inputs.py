"""The input files of a run, in order, and their identity."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import require_regular
from modelzoo_trainer.errors import ConfigError, reason_of, suggest
from modelzoo_trainer.zoo.rows.sections import Setup

log = logging.getLogger("modelzoo_trainer.preprocessing")


class Format(Enum):
    """How a file is read."""

    LINES = "lines"
    TEXT = "text"
    FASTA = "fasta"
    PARQUET = "parquet"
    DATASET = "dataset"


SUFFIXES: Final = {
    ".jsonl": (Format.LINES, ""),
    ".jsonl.gz": (Format.LINES, "gz"),
    ".json.gz": (Format.LINES, "gz"),
    ".jsonl.zst": (Format.LINES, "zst"),
    ".jsonl.zst.tar": (Format.LINES, "zst.tar"),
    ".txt": (Format.TEXT, ""),
    ".fasta": (Format.FASTA, ""),
    ".parquet": (Format.PARQUET, ""),
}
"""Endings of the names of files that are read, with their format and compression."""
_KEYS: Final = ("type", "source", "split", "top_level_as_subsets", "subsets")
_DATA: Final = "huggingface"


@dataclass(frozen=True, slots=True)
class Input:
    """One file, or a dataset as a whole."""

    name: str
    """Path below the source, with `/`."""
    path: str
    format: Format
    compression: str = ""

    @property
    def has_lines(self) -> bool:
        """Whether its lines can be counted where they are on disk."""
        return self.format not in (Format.PARQUET, Format.DATASET) and not self.compression


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that is read."""

    files: tuple[Input, ...]
    fingerprint: str
    """Changes with the names, sizes and times of the files."""
    num_bytes: int
    """On disk; of a dataset, in memory."""
    dataset: Any = None
    """A Hugging Face dataset, which has one entry in `files`."""

    def named(self, name: str) -> Input | None:
        """Return the file of a name."""
        return next((one for one in self.files if one.name == name), None)


def find_inputs(setup: Setup) -> Inputs:
    """Return the inputs that `setup` names, by name.

    Raises:
        ConfigError: If there are none, or one cannot be read.
    """
    data = setup.data
    kind = data.get("type", "local")
    if kind == _DATA and setup.metadata_files is None:
        return _dataset(data)
    if kind not in ("local", _DATA):
        raise ConfigError(
            f"setup.data.type: expected 'local' or 'huggingface', got {kind!r}. "
            f"{suggest(str(kind), ('local', _DATA))}"
        )
    for key in data:
        if key not in _KEYS[:2] + _KEYS[3:]:
            raise ConfigError(
                f"setup.data.{key}: no such setting of type 'local'. {suggest(key, _KEYS)}"
            )
    listed = _listed(setup.metadata_files)
    found = listed if listed is not None else _below(data.get("source"))
    facts: list[tuple[str, int, int]] = []
    for one in found:
        status = _status(Path(one.path))
        facts.append((one.name, status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return Inputs(tuple(found), digest, sum(size for _, size, _ in facts))


def subsets(setup: Setup) -> list[str]:
    """Return the sub-folders that are preprocessed each by itself; none = the whole source.

    Raises:
        ConfigError: If a named one does not exist.
    """
    data = setup.data
    asked = data.get("subsets") or data.get("top_level_as_subsets")
    if not asked:
        return []
    root = Path(str(data.get("source"))).expanduser()
    there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    names = there if asked is True else [str(name) for name in asked]
    for name in names:
        if name not in there:
            raise ConfigError(
                f"setup.data.subsets: {name!r} is not a folder in {str(root)!r}. "
                f"{suggest(name, there)}"
            )
    if not names:
        raise ConfigError(f"setup.data.source: {str(root)!r} has no sub-folders for subsets.")
    return names


def format_of(path: Path) -> tuple[Format, str] | None:
    """Return the format and compression of a file by its name; None if it is not read."""
    name = path.name.lower()
    longest = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)
    return None if longest is None else SUFFIXES[longest]


def _below(source: Any) -> list[Input]:
    if not isinstance(source, str) or not source:
        raise ConfigError("setup.data.source: missing; set it to the folder of the input files.")
    root = Path(source).expanduser()
    if root.is_file():
        return [_input(root, root.name)]
    if not root.is_dir():
        raise ConfigError(
            f"setup.data.source: {source!r} does not exist. Give the folder of the input files."
        )
    paths = _walked(root)
    read = [path for path in paths if format_of(path) is not None]
    found = [_input(path, path.relative_to(root).as_posix()) for path in read]
    others = Counter(path.suffix or path.name for path in paths if format_of(path) is None)
    if not found:
        raise ConfigError(
            f"setup.data.source: {source!r} has no file whose name ends in {', '.join(SUFFIXES)}."
        )
    if others:
        kinds = ", ".join(f"{suffix} ({count})" for suffix, count in sorted(others.items())[:8])
        log.warning("Files of other kinds in %s are not read: %s", source, kinds)
    return sorted(found, key=lambda one: one.name)


def _walked(root: Path) -> list[Path]:
    """Return all files below a folder, also in linked folders, but no folder twice in a path.

    Raises:
        ConfigError: If a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"setup.data.source: {error.filename!r} cannot be listed: {reason_of(error)}."
        ) from error

    found = []
    above = {os.fspath(root): frozenset((os.path.realpath(root),))}
    for folder, inner, names in os.walk(root, onerror=refuse, followlinks=True):
        seen = above.pop(folder)
        for name in tuple(inner):
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if real in seen:  # a link to a folder above it
                inner.remove(name)
            else:
                above[path] = seen | {real}
        found += [Path(folder, name) for name in names]
    return found


def _listed(metadata_files: str | list[str] | None) -> list[Input] | None:
    """Return the files that text files list, one a line, in that order."""
    if metadata_files is None:
        return None
    names = metadata_files.split(",") if isinstance(metadata_files, str) else metadata_files
    found = []
    for name in filter(None, map(str.strip, names)):
        try:
            lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"setup.metadata_files: {name!r} cannot be read: {error}.") from error
        found += [_input(Path(line).expanduser(), line) for line in map(str.strip, lines) if line]
    if not found:
        raise ConfigError(f"setup.metadata_files: {metadata_files!r} lists no file.")
    doubled = [name for name, count in Counter(one.name for one in found).items() if count > 1]
    if doubled:
        raise ConfigError(f"setup.metadata_files: {doubled[0]!r} is listed twice.")
    return found


def _input(path: Path, name: str) -> Input:
    known = format_of(path)
    if known is None:
        raise ConfigError(
            f"{str(path)!r} cannot be read: its name ends in none of {', '.join(SUFFIXES)}."
        )
    return Input(name, str(path), *known)


def _status(path: Path) -> os.stat_result:
    require_regular(path)
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {reason_of(error)}.") from error


def _dataset(data: dict[str, Any]) -> Inputs:
    """Return a dataset of the `datasets` library: of a folder, or a name on the hub."""
    source, split = data.get("source"), data.get("split")
    if not isinstance(source, str) or not isinstance(split, str):
        lacks = "split" if isinstance(source, str) else "source"
        raise ConfigError(f"setup.data.{lacks}: missing; type 'huggingface' requires it.")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "setup.data.type: 'huggingface' requires the datasets library, which is not "
            'installed: pip install "modelzoo-trainer[preprocess]"'
        ) from error
    try:
        rows = _loaded(datasets, Path(source).expanduser(), data)
    except Exception as error:  # of the network, the hub, or a file
        raise ConfigError(
            f"setup.data: dataset {source!r}, split {split!r}, cannot be loaded: "
            f"{reason_of(error)}."
        ) from error
    name = f"{source}/{split}"
    facts = [name, rows.num_rows, rows._fingerprint]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    one = Input(name, source, Format.DATASET)
    return Inputs((one,), digest, int(rows.data.nbytes), rows)


def _loaded(datasets: Any, folder: Path, data: dict[str, Any]) -> Any:
    """Return a dataset that was saved by `save_to_disk`, or one that `load_dataset` knows."""
    split = data["split"]
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    others = {key: value for key, value in data.items() if key not in (*_KEYS, "format")}
    kind = data.get("format")
    if kind is not None and folder.is_dir():
        loader = {"jsonl": "json"}.get(str(kind), str(kind))
        return datasets.load_dataset(loader, data_dir=str(folder), split=split, **others)
    return datasets.load_dataset(data["source"], split=split, **others)
