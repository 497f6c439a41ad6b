"""Read rows of HDF5 files through a limited number of open files."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.data.hdf5.files import DATASET, RowFile, h5py_module
from modelzoo_trainer.errors import ConfigError

NUM_OPEN: Final = 128
_CLOSED: Final = -1
_INHERITED: Final[list[Any]] = []
"""Files opened before a fork: closing them here would change the library's state of the parent."""

Rows = NDArray[Any]


class _OpenFile(Protocol):
    def read(self, start: int, stop: int) -> Rows: ...

    def close(self) -> None: ...


class OpenFiles:
    """The files that this process has open: at most `limit`, the least recently used is closed.

    A forked or spawned process opens its own.
    """

    def __init__(self, limit: int = NUM_OPEN) -> None:
        self.limit = limit
        self._open: OrderedDict[RowFile, _OpenFile] = OrderedDict()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # nothing is open in another process

    def read(self, file: RowFile, start: int, stop: int) -> Rows:
        """Return rows [start, stop) of a file; of a 1-D dataset, tokens.

        Raises:
            ConfigError: With file, dataset and row, if the file is damaged or gone.
            OSError: Likewise, if the operating system reports another problem.
        """
        try:
            return self._opened(file).read(start, stop)
        except OSError as error:
            raise self._explained(error, file, start, stop) from error

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def __len__(self) -> int:
        return len(self._open)

    def _opened(self, file: RowFile) -> _OpenFile:
        if self._pid != os.getpid():
            _INHERITED.append(self._open)
            self._open, self._pid = OrderedDict(), os.getpid()
        found = self._open.get(file)
        if found is not None:
            self._open.move_to_end(file)
            return found
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)[1].close()
        found = _ThroughLibrary(file) if file.offset is None else _Contiguous(file, file.offset)
        self._open[file] = found
        return found

    def _explained(self, error: OSError, file: RowFile, start: int, stop: int) -> Exception:
        row = start
        while row < stop - 1 and self._is_readable(file, row):
            row += 1
        what = f"{file.path}: dataset {DATASET!r}, {'row' if file.row_shape else 'token'} {row}"
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            return OSError(error.errno, f"{what} cannot be read: {error.strerror or error}")
        return ConfigError(
            f"{what} cannot be read ({error}). The file is damaged or gone: copy or create it "
            f"again."
        )

    def _is_readable(self, file: RowFile, row: int) -> bool:
        try:
            self._opened(file).read(row, row + 1)
        except OSError:
            return False
        return True


class _ThroughLibrary:
    """A file of which h5py reads the rows: they are compressed, or in chunks."""

    def __init__(self, file: RowFile) -> None:
        path = os.path.expanduser(file.path)
        self._file = h5py_module().File(path, "r", locking=False, rdcc_nbytes=file.cache_bytes)
        self._data = self._file[DATASET]

    def read(self, start: int, stop: int) -> Rows:
        """Return rows; several at once are faster than one by one."""
        data = self._data
        if stop > data.shape[0]:
            raise OSError(f"the dataset has only {data.shape[0]} rows now")
        rows: Rows = data[start][None] if stop - start == 1 and data.ndim > 1 else data[start:stop]
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Contiguous:
    """A file with contiguous rows, which need no library.

    Unlike a memory map, reading a file that has been truncated raises an exception.
    """

    def __init__(self, file: RowFile, offset: int) -> None:
        self._number = _CLOSED
        self._number = os.open(os.path.expanduser(file.path), os.O_RDONLY | os.O_CLOEXEC)
        self._shape, self._dtype, self._offset = file.row_shape, file.dtype, offset
        self._row_bytes = int(np.prod(file.row_shape, dtype=np.int64)) * file.dtype.itemsize

    def read(self, start: int, stop: int) -> Rows:
        """Return rows."""
        rows: Rows = np.empty((stop - start, *self._shape), self._dtype)
        left = rows.reshape(-1).view(np.uint8).data
        position = self._offset + start * self._row_bytes
        while left:
            num = os.preadv(self._number, [left], position)
            if not num:
                raise OSError("the file ends before")
            left, position = left[num:], position + num
        return rows

    def close(self) -> None:
        """Close the file. Idempotent."""
        number, self._number = self._number, _CLOSED
        if number != _CLOSED:
            os.close(number)

    def __del__(self) -> None:
        self.close()
