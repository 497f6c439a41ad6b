"""Open a dataset of Hugging Face's `datasets`: files, a saved folder, or a name of the Hub."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, reason_of, suggest
from modelzoo_trainer.zoo.hugging_face.folders import HUB_NAME

log = logging.getLogger("modelzoo_trainer.data.hugging_face")

OWNER: Final = "HuggingFaceDataProcessor"

DataFiles = str | list[str] | dict[str, Any]

_BUILDERS: Final = ("json", "csv", "parquet", "text", "arrow")
_SUFFIXES: Final = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
_COMPRESSED: Final = (".gz", ".zst", ".xz", ".bz2")
_END_BYTES: Final = 1 << 16
_SAVED: Final = ("state.json", "dataset_dict.json")
_INSTALL: Final = 'pip install "modelzoo-trainer[huggingface]"'
_NO_EFFECT: Final = ("name", "data_files", "data_dir", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSource:
    """Where a dataset is, as the arguments of the data processor say.

    Args:
        path: A file, a folder, a format (`json`, ...) of `data_files`, or a name of the Hub.
        name: The configuration of a dataset that has several.
        data_files: Files, or glob patterns, of a format; or a mapping of these by split.
        data_dir: A folder of files of a format, or of the dataset.
        split: The split.
        revision: Branch, tag or commit of a repository of the Hub.
        streaming: Whether rows are read as they are needed.
    """

    path: str
    name: str | None = None
    data_files: DataFiles | None = None
    data_dir: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    def check(self) -> list[str]:
        """Check the arguments without reading data; return what is missing on this machine.

        Raises:
            ConfigError: If they exclude each other.
        """
        place = Path(self.path).expanduser()
        if place.is_file():
            self._refuse_others(f"{self.path!r} is a file", _NO_EFFECT)
            _format_of(place)
            return []
        if self._is_saved:
            self._refuse_others(f"{self.path!r} is a folder that save_to_disk wrote", _NO_EFFECT)
            return []
        if self.path in _BUILDERS:
            self._refuse_others(f"{self.path!r} is a format of files", ("revision",))
            if self.data_files is None and self.data_dir is None:
                raise ConfigError(
                    f"{OWNER}.path: {self.path!r} is a format of files, but no files are given. "
                    f"Set data_files, or name a file as path."
                )
            return self._missing_files()
        if place.is_dir():
            self._refuse_others(f"{self.path!r} is a local folder", ("revision",))
            return []
        if not HUB_NAME.fullmatch(self.path) or Path(self.path).suffix in _SUFFIXES:
            return [
                f"{OWNER}.path: {self.path!r} does not exist. Give a file, a folder, a format of "
                f"files ({', '.join(_BUILDERS)}) with data_files, or a name of the Hub."
            ]
        return []

    def open(self, cache_dir: str | None = None) -> Any:
        """Return the split: a `datasets.Dataset`, or an `IterableDataset` with `streaming`.

        Args:
            cache_dir: Where `datasets` keeps what it makes of files; None = its default.

        Raises:
            ConfigError: If it cannot be read, has no such split, or is empty.
        """
        if missing := self.check():
            raise ConfigError(missing[0])
        datasets = datasets_library(f"{OWNER}.path")
        with _without_progress_bars(datasets):
            found = self._saved(datasets) if self._is_saved else self._loaded(datasets, cache_dir)
        if not self.streaming and not len(found):
            raise ConfigError(self._empty)
        return found

    def identity(self) -> str:
        """Return a digest of the arguments and of the local files; of a name of the Hub, its own.

        It covers a file's name, its size, and 64 KiB of both ends.
        """
        digest = hashlib.sha256(repr((self.name, self.split, self.revision)).encode())
        files = self._local_files()
        if not files:
            digest.update(repr((self.path, self.data_files, self.data_dir)).encode())
        for name, file in files:
            digest.update(repr((name, file.stat().st_size)).encode())
            with file.open("rb") as content:
                digest.update(content.read(_END_BYTES))
                content.seek(max(0, file.stat().st_size - _END_BYTES))
                digest.update(content.read())
        return digest.hexdigest()

    def _local_files(self) -> list[tuple[str, Path]]:
        """Return the files, each with its name, which is the same where the data is moved to."""
        place = Path(self.path).expanduser()
        if place.is_file():
            return [(place.name, place)]
        if self.data_files is not None:
            base = place if place.is_dir() and self.path not in _BUILDERS else Path()
            found = [
                Path(name)
                for pattern in _names(self.data_files)
                for name in sorted(glob.glob(str(base / self._below(pattern)), recursive=True))
            ]
            return [(file.name, file) for file in found if file.is_file()]
        folder = place if self.data_dir is None else Path(self.data_dir).expanduser()
        return [
            (file.relative_to(folder).as_posix(), file)
            for file in sorted(folder.rglob("*"))
            if file.is_file() and _SUFFIXES.keys() & set(file.suffixes)
        ]

    @property
    def where(self) -> str:
        """The source in messages about a row."""
        files = self.data_files
        if self.path in _BUILDERS and files is not None:
            return files if isinstance(files, str) else f"{self.path} files, split {self.split}"
        return self.path

    @property
    def _empty(self) -> str:
        return (
            f"{OWNER}.path: split {self.split!r} of {self.where!r} has no rows. Give files "
            f"with rows, or another split."
        )

    @property
    def _is_saved(self) -> bool:
        folder = Path(self.path).expanduser()
        return folder.is_dir() and any((folder / name).is_file() for name in _SAVED)

    @property
    def _is_local(self) -> bool:
        return self.path in _BUILDERS or Path(self.path).expanduser().exists()

    def _saved(self, datasets: Any) -> Any:
        folder = str(Path(self.path).expanduser())
        try:
            found = datasets.load_from_disk(folder)
        except Exception as error:  # the library raises any
            raise ConfigError(
                f"{OWNER}.path: {self.path!r} cannot be read: {reason_of(error)}. Write it again "
                f"with save_to_disk."
            ) from error
        found = self._selected(datasets, found if isinstance(found, Mapping) else _named(found))
        return found.to_iterable_dataset(num_shards=_shards(found)) if self.streaming else found

    def _selected(self, datasets: Any, found: Mapping[str, Any]) -> Any:
        """Return the rows that `split` names, such as `train[:90%]` or `train+test`."""
        try:
            parts = datasets.ReadInstruction.from_spec(self.split).to_absolute(
                {name: len(rows) for name, rows in found.items()}
            )
        except (ValueError, AssertionError) as error:
            raise ConfigError(_no_split(self, list(found))) from error
        chosen = []
        for part in parts:
            rows = found[part.splitname]
            first, stop = part.from_ or 0, len(rows) if part.to is None else part.to
            if first < stop:
                is_whole = (first, stop) == (0, len(rows))
                chosen.append(rows if is_whole else rows.select(range(first, stop)))
        if not chosen:
            raise ConfigError(self._empty)
        return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)

    def _loaded(self, datasets: Any, cache_dir: str | None) -> Any:
        path = Path(self.path).expanduser()
        given: dict[str, Any] = {
            key: getattr(self, key) for key in _NO_EFFECT if getattr(self, key) is not None
        }
        if path.is_file():
            given["data_files"] = str(path)
        if "data_files" in given:
            given["data_files"] = _expanded(given["data_files"])
        builder = _format_of(path) if path.is_file() else self.path
        if self.data_files is None and path.is_dir() and builder not in _BUILDERS:
            self._warn_of_formats()
        try:
            return datasets.load_dataset(
                builder,
                split=self.split,
                streaming=self.streaming,
                cache_dir=cache_dir,
                **given,
            )
        except Exception as error:  # the library raises any
            raise ConfigError(self._refusal(error, builder, given.get("data_files"))) from error

    def _warn_of_formats(self) -> None:
        """Warn of a folder with files of several formats: the library reads only one format."""
        suffixes = {suffix for _, file in self._local_files() for suffix in file.suffixes}
        found = sorted(suffixes & _SUFFIXES.keys())
        if len({_SUFFIXES[suffix] for suffix in found}) > 1:
            log.warning(
                "%s.path: folder %r has files of several formats (%s); only files of one format "
                "are read. Set path to a format, and data_files.",
                OWNER,
                self.path,
                ", ".join(found),
            )

    def _refusal(self, error: Exception, builder: str, files: Any) -> str:
        text = _first_line(error.__cause__ or error)
        if "Unrecognized instruction format" in text:
            return _no_split(self, [])
        if "split" in str(error).lower() and isinstance(error, ValueError):
            return _no_split(self, re.findall(r"'([^']+)'", str(error).partition("[")[2]))
        files_here = self._local_files() if self._is_local else []
        if Path(self.path).expanduser().is_dir() and not files_here:
            return (
                f"{OWNER}.path: the folder {self.path!r} cannot be read: {text}. It has no files "
                f"with the suffixes {', '.join(_SUFFIXES)}. Give another folder."
            )
        is_empty = files_here and not any(file.stat().st_size for _, file in files_here)
        if is_empty or "corresponds to no data" in text:
            return self._empty
        if self._is_local:
            bad = next(_bad_lines(files), None) if builder == "json" else None
            if bad is not None:
                return f"{OWNER}.path: {bad}. Each line must be a JSON object."
            return unreadable(self.where, error)
        return (
            f"{OWNER}.path: {self.path!r} is not a file or folder here, and cannot be fetched from "
            f"the Hub ({text}). Without a network, run 'hf download {self.path} --repo-type "
            f"dataset --local-dir DIR' elsewhere, copy DIR here, and give its path."
        )

    def _missing_files(self) -> list[str]:
        missing = [
            f"{OWNER}.data_files: {name!r} does not exist. Give files or glob patterns."
            for name in _names(self.data_files)
            if "://" not in name and not glob.glob(self._below(name), recursive=True)
        ]
        if self.data_dir is not None and not Path(self.data_dir).expanduser().is_dir():
            missing.insert(0, f"{OWNER}.data_dir: there is no folder {self.data_dir!r}.")
        return missing

    def _below(self, name: str) -> str:
        return str(Path(self.data_dir or "").expanduser() / Path(name).expanduser())

    def _refuse_others(self, what: str, keys: tuple[str, ...]) -> None:
        for key in keys:
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"{OWNER}.{key}: {getattr(self, key)!r} has no effect, because path {what}. "
                    f"Remove {key}."
                )


def datasets_library(key: str) -> Any:
    """Import `datasets` and return it.

    Args:
        key: The setting that needs it, for the message.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
    raise ConfigError(f"{key} requires datasets, which is not installed: {_INSTALL}")


def column_names(dataset: Any, where: str) -> list[str]:
    """Return the names of the columns; of a stream whose format has no schema, of its first row.

    Raises:
        ConfigError: If a stream has no rows, or its first cannot be read.
    """
    if dataset.column_names:
        return list(dataset.column_names)
    try:
        first = list(islice(iter(dataset), 1))
    except Exception as error:  # the library raises any
        raise ConfigError(unreadable(where, error)) from error
    if not first:
        raise ConfigError(f"{OWNER}.path: {where!r} has no rows. Give files with rows.")
    return list(first[0])


def require_column(name: str, key: str, columns: list[str], where: str) -> None:
    """Raise that a column is missing, if it is.

    Raises:
        ConfigError: It names the columns that there are.
    """
    if name not in columns:
        hint = suggest(name, columns)
        near = f"{hint} " if hint.startswith("Did") else ""
        raise ConfigError(
            f"{OWNER}.{key}: {where!r} has no column {name!r}; its columns are "
            f"{', '.join(columns)}. {near}Set {key}."
        )


def unreadable(where: str, error: Exception) -> str:
    """Return the message about data that cannot be read."""
    why = _first_line(error.__cause__ or error)
    return f"{OWNER}.path: {where!r} cannot be read: {why}. Check its files, or write them again."


def _no_split(source: DatasetSource, known: list[str]) -> str:
    there = f" It has: {', '.join(known)}." if known else ""
    whole = " A stream of files has no slices." if source.streaming and "[" in source.split else ""
    return (
        f"{OWNER}.split: {source.where!r} has no split {source.split!r}.{there}{whole} Set split: "
        f"a name, or a slice such as train[:90%]."
    )


def _first_line(error: BaseException) -> str:
    lines = reason_of(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _named(rows: Any) -> dict[str, Any]:
    """Return a saved dataset by its split, which is `train` if it was saved without one."""
    return {"train" if rows.split is None else str(rows.split): rows}


def _shards(dataset: Any) -> int:
    return min(len(dataset), 64)


def _format_of(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    kind = _SUFFIXES.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise ConfigError(
            f"{OWNER}.path: {str(path)!r} is not one of the files that are read: "
            f"{', '.join(_SUFFIXES)}. For another name, give the format as path and the file as "
            f"data_files."
        )
    return kind


def _expanded(files: Any) -> Any:
    if isinstance(files, str):
        return files if "://" in files else str(Path(files).expanduser())
    if isinstance(files, Mapping):
        return {key: _expanded(value) for key, value in files.items()}
    return [_expanded(name) for name in files]


def _names(files: Any) -> list[str]:
    if files is None:
        return []
    if isinstance(files, str):
        return [files]
    values = files.values() if isinstance(files, Mapping) else files
    return [name for value in values for name in _names(value)]


def _bad_lines(files: Any) -> Iterator[str]:
    """Yield a message for each line of JSON files that is not an object."""
    for pattern in _names(files):
        for name in sorted(glob.glob(pattern, recursive=True)):
            if Path(name).suffix in _COMPRESSED:
                continue
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if number == 1 and line.lstrip().startswith("["):
                        break  # one array
                    if line.strip() and (problem := _problem(line)) is not None:
                        yield f"{name}:{number} {problem}"


def _problem(line: str) -> str | None:
    try:
        value = json.loads(line)
    except ValueError as error:
        return f"is not JSON ({error})"
    return None if isinstance(value, dict) else f"is not an object but {line.strip()[:40]!r}"


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    """Context manager: `datasets` shows no progress bars."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
