"""The HDF5 files of folders: which there are, what their headers say, whether they change."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.rows.hdf5_format import COUNT, DATASET, INCOMPLETE, SUFFIX

log = logging.getLogger("modelzoo_trainer.data")

_EXTRA: Final = "pip install 'modelzoo-trainer[hdf5]'"
_DIGEST_BYTES: Final = 4


class FileLayout(Enum):
    """How the rows of a dataset lie in a file."""

    CONTIGUOUS = "contiguous"
    COMPRESSED = "compressed"
    """Each row is a chunk, compressed with gzip."""
    SHUFFLED = "shuffled"
    """Likewise, after the filter `shuffle`."""
    OTHER = "other"


class RowFile(NamedTuple):
    """What is known of a file without reading its rows.

    Args:
        path: As `data_dir` gives it.
        size: Bytes of the file.
        mtime_ns: When it was changed.
        num_rows: Rows, or tokens of a 1-D dataset.
        row_shape: Shape of a row; () = the dataset is 1-D.
        dtype: Of the dataset.
        layout: How rows lie in the file.
        offset: Position of contiguous rows in the file.
        cache_bytes: Size of h5py's cache that avoids reading a chunk twice.
        dataset: Name of the dataset in the file.
    """

    path: str
    size: int
    mtime_ns: int
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: FileLayout
    offset: int
    cache_bytes: int
    dataset: str = DATASET


_DEFLATE, _SHUFFLE = 1, 2  # numbers of HDF5's filters
_LAYOUTS: Final = {
    (_DEFLATE,): FileLayout.COMPRESSED,
    (_SHUFFLE, _DEFLATE): FileLayout.SHUFFLED,
}

_HEADERS: Final[dict[tuple[str, str], RowFile]] = {}
"""Headers read by this process: a dataloader is created for each validation."""


def h5py_module() -> Any:
    """Return the library h5py.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module("h5py")
    except ImportError as error:
        raise ConfigError(lacking_h5py()) from error


def lacking_h5py() -> str:
    """Return a message that h5py is not installed."""
    return f"data_dir: reading HDF5 files requires h5py, which is not installed: {_EXTRA}"


def missing_folders(folders: Iterable[str], argument: str) -> list[str]:
    """Return a message for each folder that cannot be read now; no file is opened."""
    found = []
    for folder in folders:
        path = Path(folder).expanduser()
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            found.append(f"{argument} {folder!r} {problem}. Give a folder with {SUFFIX} files.")
        elif (path / INCOMPLETE).exists():
            found.append(_unfinished(folder, argument))
        elif _is_without_files(path):
            found.append(
                f"{argument} {folder!r} has no {SUFFIX} file. Files in subfolders and files with "
                f"other endings are not read; give the folder that has them."
            )
    return found


def _is_without_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return not any(one.name.endswith(SUFFIX) and not one.is_dir() for one in entries)
    except OSError:  # raised when the files are opened
        return False


def find_files(folders: Sequence[str], argument: str = "data_dir") -> list[str]:
    """Return the paths of the `.h5` files directly in the folders, sorted.

    Raises:
        ConfigError: If a folder is missing, has no such file, or its preprocessing has not ended.
    """
    if problems := missing_folders(folders, argument):
        raise ConfigError(problems[0])
    paths: list[str] = []
    for folder in folders:
        try:
            found = _names(folder)
        except OSError as error:
            raise ConfigError(
                f"{argument} {folder!r} cannot be listed: {reason_of(error)}."
            ) from error
        paths += [os.path.join(folder, name) for name in found]
    return sorted(paths)


def _names(folder: str) -> list[str]:
    """Return the names of the files of a folder; subfolders are left out.

    Raises:
        ConfigError: If there is a link to nothing, whose samples would be missing.
    """
    found = []
    with os.scandir(Path(folder).expanduser()) as entries:
        for one in entries:
            if not one.name.endswith(SUFFIX) or one.is_dir():
                continue
            if not one.is_file():
                raise ConfigError(
                    f"{os.path.join(folder, one.name)}: not a file, nor a link to one that exists. "
                    f"Restore or remove it."
                )
            found.append(one.name)
    return found


def _unfinished(folder: str, argument: str) -> str:
    return (
        f"{argument} {folder!r} has a file {INCOMPLETE}: its preprocessing is running or was "
        f"stopped. Run it again to complete the folder."
    )


def read_header(path: str, dataset: str = DATASET, *, has_texts: bool = False) -> RowFile:
    """Return what the header of a file says; of an unchanged file, it is read once in a process.

    Args:
        path: The file.
        dataset: Name of the dataset.
        has_texts: Whether that is one of texts, not of integers.

    Raises:
        ConfigError: If the file cannot be read, or has no such dataset.
    """
    real = os.path.abspath(os.path.expanduser(path))
    status = os.stat(real)
    known = _HEADERS.get((real, dataset))
    if known is not None and (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return known._replace(path=path)
    h5py = h5py_module()
    try:
        with h5py.File(real, "r", locking=False) as file:
            found = _header(h5py, file, dataset, path, status, has_texts=has_texts)
    except ConfigError:
        raise
    except PermissionError as error:
        raise ConfigError(
            f"{path}: the file cannot be read: this user lacks permission. Change it."
        ) from error
    except Exception as error:  # the library has no type of its own for a damaged file
        why = reason_of(error)
        raise ConfigError(
            f"{path}: the file cannot be read ({why}). It is damaged or truncated: copy or "
            f"create it again."
        ) from error
    _HEADERS[real, dataset] = found
    return found


def _header(
    h5py: Any, file: Any, name: str, path: str, status: os.stat_result, *, has_texts: bool
) -> RowFile:
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        names = ", ".join(repr(one) for one in file if one != name) or "nothing else"
        raise ConfigError(
            f"{path}: there is no dataset {name!r}; the file has {names}. Remove it from the "
            f"folder, or preprocess the data again."
        )
    shape, dtype = dataset.shape, dataset.dtype
    is_right = h5py.check_string_dtype(dtype) is not None if has_texts else dtype.kind in "iu"
    if not is_right or not shape or 0 in shape[1:]:
        expected = "(samples, features, tokens) or (tokens,)"
        if has_texts or name != DATASET:
            expected = "(samples, ...)"
        raise ConfigError(
            f"{path}: dataset {name!r} has dtype {dtype} and shape {shape}, expected "
            f"{'texts' if has_texts else 'integers'} of shape {expected}. Preprocess the data "
            f"again."
        )
    num_rows = file.attrs.get(COUNT, shape[0])
    if len(shape) > 1 and not np.array_equal(num_rows, shape[0]):
        log.warning(
            "%s: the attribute %s is %s, but dataset %r has %d rows. All rows are used.",
            path,
            COUNT,
            num_rows,
            name,
            shape[0],
        )
    layout = FileLayout.OTHER if has_texts else _layout_of(file, dataset)
    rows_per_chunk = 1 if dataset.chunks is None else dataset.chunks[0]
    cache_bytes = 0  # a chunk that is one row is never read twice
    if dataset.chunks is not None and rows_per_chunk > 1:
        cache_bytes = int(np.prod(dataset.chunks)) * dtype.itemsize
    return RowFile(
        path=path,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        num_rows=shape[0],
        row_shape=tuple(shape[1:]),
        dtype=dtype,
        layout=layout,
        offset=dataset.id.get_offset() if layout is FileLayout.CONTIGUOUS else 0,
        cache_bytes=cache_bytes,
        dataset=name,
    )


def _layout_of(file: Any, dataset: Any) -> FileLayout:
    """Return how rows lie in a file; `OTHER` if they cannot be read without the library."""
    is_plain = not (dataset.is_virtual or dataset.external or file.userblock_size)
    if not is_plain or not hasattr(os, "preadv"):
        return FileLayout.OTHER
    if dataset.chunks is None:
        return FileLayout.OTHER if dataset.id.get_offset() is None else FileLayout.CONTIGUOUS
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(idx)[0] for idx in range(properties.get_nfilters())]
    if dataset.chunks != (1, *dataset.shape[1:]) or not hasattr(dataset.id, "chunk_iter"):
        return FileLayout.OTHER
    return _LAYOUTS.get(tuple(filters), FileLayout.OTHER)


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files whose rows follow each other, in this order.

    Args:
        files: The files, with equal shapes of rows.
        starts: Number of rows before each file.
        dtype: One that holds the values of all.
    """

    files: tuple[RowFile, ...]
    starts: NDArray[np.int64]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, groups: Sequence[Sequence[RowFile]]) -> RowFiles:
        """Return files as one sequence of rows.

        Args:
            groups: Files of equal dtypes; files of another group may have another one.

        Raises:
            ConfigError: If files differ in shape of rows or dtype, or a group has no rows.
        """
        for group in groups:
            for one in group:
                first = groups[0][0]
                expected = (group[0].dtype, first.row_shape)
                if (one.dtype, one.row_shape) != expected:
                    like = group[0] if one.dtype != group[0].dtype else first
                    raise ConfigError(
                        f"{one.path}: dataset {one.dataset!r} has {_described(one)}, but in "
                        f"{like.path} it has {_described(like)}. All files must be equal in this."
                    )
            if not any(one.num_rows for one in group):
                raise ConfigError(
                    f"{group[0].path}: dataset {group[0].dataset!r} has no rows, in no file "
                    f"of its folder. Preprocess the data again."
                )
        files = tuple(one for group in groups for one in group)
        counts = np.array([one.num_rows for one in files], dtype=np.int64)
        dtype = np.result_type(*{one.dtype for one in files})
        if dtype.kind not in "iu":
            names = ", ".join(sorted({str(one.dtype) for one in files}))
            raise ConfigError(f"mixture: its files have dtypes {names}. Give all the same.")
        return cls(files, np.cumsum(counts) - counts, dtype)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.starts[-1]) + self.files[-1].num_rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row; () = datasets are 1-D."""
        return self.files[0].row_shape

    def check_num_rows(self, others: Sequence[RowFile], advice: str) -> None:
        """Check that other datasets of the same files have as many rows.

        Args:
            others: One for each file.
            advice: What to do if not.

        Raises:
            ConfigError: If one has another number.
        """
        for one, other in zip(self.files, others, strict=True):
            if one.num_rows != other.num_rows:
                raise ConfigError(
                    f"{one.path}: dataset {other.dataset!r} has {other.num_rows} rows, but "
                    f"{one.dataset!r} has {one.num_rows}. {advice}"
                )

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the file numbers of rows, and the row numbers in these files."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        return numbers, rows - self.starts[numbers]

    def place_of(self, row: int) -> str:
        """Return the file, dataset and row of a row, for messages."""
        (number,), (inner,) = self.locate(np.array([row]))
        word = "row" if self.row_shape else "token"
        file = self.files[number]
        return f"{file.path}: dataset {file.dataset!r}, {word} {inner}"


def _described(file: RowFile) -> str:
    shape = ", ".join(map(str, ("rows", *file.row_shape)))
    return f"dtype {file.dtype} and shape ({shape})"


class FolderState:
    """The names, sizes and times of the files of folders, to notice that they change.

    Args:
        folders: As `data_dir` gives them.
        files: Their files.
    """

    def __init__(self, folders: Sequence[str], files: Iterable[RowFile]) -> None:
        self.folders = tuple(dict.fromkeys(folders))
        self._known: Mapping[str, tuple[int, int]] = MappingProxyType(
            {one.path: (one.size, one.mtime_ns) for one in files}
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"folders": self.folders, "known": dict(self._known)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folders, self._known = state["folders"], MappingProxyType(state["known"])

    def check(self) -> None:
        """Check that no file has been added, removed or changed.

        Raises:
            ConfigError: With the file, if one has.
        """
        known = dict(self._known)
        for folder in self.folders:
            try:
                names = sorted(_names(folder))
            except OSError as error:
                why = reason_of(error)
                raise self._changed(folder, f"cannot be listed any more ({why})") from error
            for name in names:
                path = os.path.join(folder, name)
                before = known.pop(path, None)
                if before is None:
                    raise self._changed(path, "has been added")
                try:
                    status = os.stat(Path(path).expanduser())
                except OSError as error:
                    raise self._changed(path, "has been removed") from error
                if (status.st_size, status.st_mtime_ns) != before:
                    raise self._changed(path, "has been changed")
        if known:
            raise self._changed(min(known), "has been removed")

    @staticmethod
    def _changed(path: str, what: str) -> ConfigError:
        return ConfigError(
            f"{path}: {what} since the dataloader was created. Restore the folder, or start the "
            f"run again to train on its new files."
        )


def fingerprint_of(parts: Iterable[Sequence[RowFile]], ranges: Any) -> int:
    """Return a number that changes with the names, sizes or rows of files.

    Args:
        parts: The files of each source of samples.
        ranges: What is selected from them; anything with a `repr`.
    """
    digest = hashlib.sha256()
    for files in parts:
        for one in files:
            digest.update(repr((os.path.basename(one.path), one.size, one.num_rows)).encode())
        digest.update(b";")
    digest.update(repr(ranges).encode())
    return int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big")
