"""Read rows of HDF5 files through a limited number of open files.

An open file of the HDF5 library takes 600 KiB and milliseconds, and must not cross a fork. So what
the common layouts need of it is read once (where rows are), and rows are then read without it.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.data.hdf5.files import FileLayout, RowFile, h5py_module

NUM_OPEN: Final = 128
_MOST_INDEXED: Final = 4_000_000  # rows, of 16 bytes each
_CLOSED: Final = -1
_INHERITED: Final[list[Any]] = []
"""Files opened before a fork: closing them here would change the library's state of the parent."""

Rows = NDArray[Any]


class ChunkIndex(NamedTuple):
    """Where the compressed rows of a file are.

    Args:
        offsets: Position of each row in the file.
        sizes: Bytes of each row in the file; 0 = it was never written.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, file: RowFile) -> ChunkIndex:
        """Read the index of a file."""
        offsets, sizes = np.zeros((2, file.num_rows), np.int64)

        def note(chunk: Any) -> None:
            row = chunk.chunk_offset[0]
            offsets[row], sizes[row] = chunk.byte_offset, 0 if chunk.filter_mask else chunk.size

        with _library_file(file) as opened:
            opened[file.dataset].id.chunk_iter(note)
        return cls(offsets, sizes)


class _OpenFile(Protocol):
    def read(self, start: int, stop: int) -> Rows: ...

    def close(self) -> None: ...


class OpenFiles:
    """The files that this process has open: at most `limit`, the least recently used is closed.

    A forked or spawned process opens its own.
    """

    def __init__(self, limit: int = NUM_OPEN) -> None:
        self.limit = limit
        self._open: OrderedDict[tuple[str, str], _OpenFile] = OrderedDict()
        self._indices: OrderedDict[RowFile, ChunkIndex] = OrderedDict()
        self._num_indexed = 0
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # nothing is open in another process

    def __len__(self) -> int:
        return len(self._open)

    def read(self, file: RowFile, start: int, stop: int) -> Rows:
        """Return rows [start, stop) of a file; of a 1-D dataset, tokens.

        Raises:
            ConfigError: With file, dataset and row, if the file is damaged or gone.
            OSError: Likewise, if the operating system reports another problem.
        """
        try:
            return self._opened(file).read(start, stop)
        except ConfigError:
            raise
        except Exception as error:  # the library has no type of its own for a damaged file
            raise self._explained(error, file, start, stop) from error

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, file: RowFile) -> _OpenFile:
        if self._pid != os.getpid():
            _INHERITED.append(self._open)
            self._open, self._pid = OrderedDict(), os.getpid()
        key = file.path, file.dataset
        found = self._open.get(key)
        if found is not None:
            self._open.move_to_end(key)
            return found
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)[1].close()
        self._open[key] = found = self._open_one(file)
        return found

    def _open_one(self, file: RowFile) -> _OpenFile:
        if file.layout is FileLayout.CONTIGUOUS:
            return _Contiguous(file)
        if file.layout is FileLayout.OTHER:
            return _ThroughLibrary(file)
        index = self._indices.get(file)
        if index is None:
            index = self._indices[file] = ChunkIndex.of(file)
            self._num_indexed += file.num_rows
            while self._num_indexed > _MOST_INDEXED and len(self._indices) > 1:
                self._num_indexed -= self._indices.popitem(last=False)[0].num_rows
        return _Compressed(file, index)

    def _explained(self, error: Exception, file: RowFile, start: int, stop: int) -> Exception:
        row = start
        while row < stop - 1 and self._is_readable(file, row):
            row += 1
        what = (
            f"{file.path}: dataset {file.dataset!r}, {'row' if file.row_shape else 'token'} {row}"
        )
        number = getattr(error, "errno", None)
        if isinstance(error, OSError) and number and not isinstance(error, FileNotFoundError):
            return OSError(number, f"{what} cannot be read: {error.strerror or error}")
        why = reason_of(error)
        return ConfigError(
            f"{what} cannot be read ({why}). The file is damaged or gone: copy or create it again."
        )

    def _is_readable(self, file: RowFile, row: int) -> bool:
        try:
            self._opened(file).read(row, row + 1)
        except Exception:  # noqa: BLE001  # as in `read`
            return False
        return True


class _ThroughLibrary:
    """A file of any layout, whose rows h5py reads."""

    def __init__(self, file: RowFile) -> None:
        self._file = _library_file(file)
        self._data = self._file[file.dataset]

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


class _Direct:
    """A file that is read without the library.

    Unlike with a memory map, reading a file that has been truncated raises an exception.
    """

    def __init__(self, file: RowFile) -> None:
        self._number = _CLOSED
        self._shape, self._dtype = file.row_shape, file.dtype
        self._number = os.open(os.path.expanduser(file.path), os.O_RDONLY | os.O_CLOEXEC)

    def _fill(self, target: memoryview, position: int) -> None:
        while target:
            num = os.preadv(self._number, [target], position)
            if not num:
                raise OSError("the file ends before")
            target, position = target[num:], position + num

    def close(self) -> None:
        """Close the file. Idempotent."""
        number, self._number = self._number, _CLOSED
        if number != _CLOSED:
            os.close(number)

    def __del__(self) -> None:
        self.close()


class _Contiguous(_Direct):
    """A file whose rows follow each other, uncompressed."""

    def __init__(self, file: RowFile) -> None:
        super().__init__(file)
        self._offset = file.offset
        self._row_bytes = int(np.prod(file.row_shape, dtype=np.int64)) * file.dtype.itemsize

    def read(self, start: int, stop: int) -> Rows:
        """Return rows."""
        rows: Rows = np.empty((stop - start, *self._shape), self._dtype)
        target = rows.reshape(-1).view(np.uint8).data
        self._fill(target, self._offset + start * self._row_bytes)
        return rows


class _Compressed(_Direct):
    """A file whose rows are compressed with gzip, each for itself."""

    def __init__(self, file: RowFile, index: ChunkIndex) -> None:
        super().__init__(file)
        self._file, self._index = file, index

    def read(self, start: int, stop: int) -> Rows:
        """Return rows."""
        index, shape, dtype = self._index, self._shape, self._dtype
        if not index.sizes[start:stop].all():
            with _library_file(self._file) as opened:
                found: Rows = opened[self._file.dataset][start:stop]
                return found
        rows: Rows = np.empty((stop - start, *shape), dtype)
        by_row = rows.reshape(len(rows), -1).view(np.uint8)
        num_bytes = by_row.shape[1]
        for number, row in enumerate(range(start, stop)):
            packed = self._bytes(int(index.offsets[row]), int(index.sizes[row]))
            content = np.frombuffer(zlib.decompress(packed, bufsize=num_bytes), np.uint8)
            if self._file.layout is FileLayout.COMPRESSED:
                by_row[number] = content
                continue
            values = by_row[number].reshape(-1, dtype.itemsize)
            for place, part in enumerate(content.reshape(dtype.itemsize, -1)):
                values[:, place] = part  # the first bytes of all values came first, and so on
        return rows

    def _bytes(self, position: int, num: int) -> bytes:
        found = os.pread(self._number, num, position)
        while len(found) < num:
            more = os.pread(self._number, num - len(found), position + len(found))
            if not more:
                raise OSError("the file ends before")
            found += more
        return found


def _library_file(file: RowFile) -> Any:
    path = os.path.expanduser(file.path)
    return h5py_module().File(path, "r", locking=False, rdcc_nbytes=file.cache_bytes)
