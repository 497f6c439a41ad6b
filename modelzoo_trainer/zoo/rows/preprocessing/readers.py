"""Input files cut into units, and the entries of a unit.

How a file is cut depends on the file alone, so that all that is computed from a unit is the same
for any number of processes. A unit of lines has those that start in a range of bytes, after
decompression: compressed and plain files give the same units.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.rows.interface import Entry
from modelzoo_trainer.zoo.rows.places import DocumentPlace
from modelzoo_trainer.zoo.rows.preprocessing.inputs import Format, Input, Inputs

UNIT_BYTES: Final = 1 << 20
TEXT_BYTES: Final = 1 << 24
"""A longer text file is cut into several documents, at ends of lines."""
DATASET_ROWS: Final = 1000
_PACKED_BYTES: Final = 1 << 16
_TO_SKIP: Final = (
    "Repair the line, or set processing.UNSAFE_skip_jsonl_decoding_errors: true to skip such lines."
)
_INSTALL: Final = 'pip install "modelzoo-trainer[preprocess]"'


class FilePart(NamedTuple):
    """A piece of a file: bytes, row groups or rows from `start` to `stop`."""

    file: Input
    start: int
    stop: int
    content: Any = None
    """What a worker cannot read by itself: lines of a compressed file, rows of a dataset."""
    line: int = 0
    """Number of lines before `content`."""


class Unit(NamedTuple):
    """What one worker processes at a time; small files share one."""

    number: int
    parts: tuple[FilePart, ...]


class Numbered(NamedTuple):
    """An entry of a file; `number` is what `Document.number` says."""

    number: int
    entry: Entry | None
    """None = skipped, as it is not valid JSON."""
    line: int | None = None
    """Where it starts, from 1; None = not known."""


def units(inputs: Inputs, columns: Sequence[str] | None) -> Iterator[Unit]:
    """Yield the units of all files, in order.

    Args:
        inputs: The files.
        columns: Of a dataset, those that are read; None = all.

    Raises:
        ConfigError: If a file cannot be read.
    """
    parts: list[FilePart] = []
    size = number = 0
    for part, num_bytes in _parts(inputs, columns):
        if parts and size + num_bytes > UNIT_BYTES:
            yield Unit(number, tuple(parts))
            parts, size, number = [], 0, number + 1
        parts.append(part)
        size += num_bytes
    if parts:
        yield Unit(number, tuple(parts))


def entries(part: FilePart, key: str | None, *, skips_invalid: bool = False) -> Iterator[Numbered]:
    """Yield the entries of a part.

    Args:
        part: Of a unit.
        key: The column of a file that has only text; None = the hook reads not exactly one.
        skips_invalid: Yield None for a line that is not valid JSON, instead of raising.

    Raises:
        ConfigError: If an entry cannot be read; the message has the file and line.
    """
    match part.file.format:
        case Format.LINES:
            yield from _lines(part, skips_invalid)
        case Format.PARQUET:
            yield from _row_groups(part)
        case Format.DATASET:
            yield from _rows(part.content, part.start)
        case Format.TEXT | Format.FASTA:
            if key is None:
                raise ConfigError(
                    f"{part.file.name}: a {part.file.format.value} file has one column, so "
                    "read_hook_kwargs must have exactly one key that ends in _key."
                )
            read = _text if part.file.format is Format.TEXT else _sequences
            yield from read(part, key)


# ---- parts


def _parts(inputs: Inputs, columns: Sequence[str] | None) -> Iterator[tuple[FilePart, int]]:
    for file in inputs.files:
        try:
            yield from _parts_of(file, inputs.dataset, columns)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
            raise ConfigError(f"{file.path!r} cannot be read: {reason_of(error)}.") from error


def _parts_of(
    file: Input, dataset: Any, columns: Sequence[str] | None
) -> Iterator[tuple[FilePart, int]]:
    if file.compression:
        yield from _decompressed(file)
    elif file.format is Format.PARQUET:
        metadata = _parquet(file).metadata
        for group in range(metadata.num_row_groups):
            yield FilePart(file, group, group + 1), metadata.row_group(group).total_byte_size
    elif file.format is Format.DATASET:
        rows = dataset if columns is None else dataset.select_columns(list(columns))
        for start in range(0, rows.num_rows, DATASET_ROWS):
            stop = min(start + DATASET_ROWS, rows.num_rows)
            yield FilePart(file, start, stop, rows[start:stop]), UNIT_BYTES
    else:
        size = Path(file.path).stat().st_size
        step = TEXT_BYTES if file.format is Format.TEXT else UNIT_BYTES
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield FilePart(file, start, stop), stop - start


def _decompressed(file: Input) -> Iterator[tuple[FilePart, int]]:
    """Yield the lines of a compressed file by the range of bytes in which they start."""
    buffer, start, lines, border = b"", 0, 0, UNIT_BYTES
    for block in _blocks(file):
        buffer += block
        while (cut := buffer.find(b"\n", max(0, border - start - 1)) + 1) > 0:
            content, buffer = buffer[:cut], buffer[cut:]
            yield FilePart(file, start, start + cut, content, lines), cut
            lines += content.count(b"\n")
            start += cut
            border = (start // UNIT_BYTES + 1) * UNIT_BYTES
    if buffer:
        yield FilePart(file, start, start + len(buffer), buffer, lines), len(buffer)


def _blocks(file: Input) -> Iterator[bytes]:
    with Path(file.path).open("rb") as raw:
        if file.compression == "gz":
            stream = gzip.GzipFile(fileobj=raw)
            while block := stream.read(UNIT_BYTES):
                yield block
        elif file.compression == "zst":
            yield from _unpacked(raw)
        else:  # an archive of compressed files
            with tarfile.open(fileobj=raw, mode="r|") as archive:
                for member in archive:
                    content = archive.extractfile(member)
                    if content is not None:
                        yield from _unpacked(content)
                        yield b"\n"


def _unpacked(stream: Any) -> Iterator[bytes]:
    """Yield the content of a compressed stream: frames, one after the other.

    Raises:
        ValueError: If it is damaged, or ends within a frame.
    """
    library = _library("zstandard")
    frame, rest = None, b""
    try:
        while block := rest or stream.read(_PACKED_BYTES):
            if frame is None:
                frame = library.ZstdDecompressor().decompressobj()
            if content := frame.decompress(block):
                yield content
            rest = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    except library.ZstdError as error:
        raise ValueError(str(error)) from error
    if frame is not None:
        raise ValueError("the compressed data end too early")


def _parquet(file: Input) -> Any:
    try:
        return _library("pyarrow.parquet").ParquetFile(file.path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ConfigError(f"{file.path!r} is not a valid Parquet file: {error}.") from error


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        what = name.partition(".")[0]
        raise ConfigError(
            f"Reading this file requires {what}, which is not installed: {_INSTALL}"
        ) from error


# ---- entries


def _lines(part: FilePart, skips_invalid: bool) -> Iterator[Numbered]:
    """Yield the objects of lines of JSON; empty lines are skipped."""
    start, content = _starting_in(part)
    is_known = part.content is not None or part.start == 0
    for number, line in enumerate(io.BytesIO(content), part.line + 1):
        if not line.isspace():
            known = number if is_known else None
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of a text that is not UTF-8
                if not skips_invalid:
                    where = DocumentPlace(part.file.path, start, known).shown(part.file)
                    raise ConfigError(f"{where}: not valid JSON: {error}. {_TO_SKIP}") from error
                yield Numbered(start, None, known)
                start += len(line)
                continue
            if not isinstance(entry, dict):
                where = DocumentPlace(part.file.path, start, known).shown(part.file)
                raise ConfigError(f"{where}: expected a JSON object, got {type(entry).__name__}.")
            yield Numbered(start, entry, known)
        start += len(line)


def _text(part: FilePart, key: str) -> Iterator[Numbered]:
    """Yield a file, or a piece of a long one, as one entry."""
    start, content = _starting_in(part)
    if content:
        yield Numbered(start, {key: _decoded(part, start, content)})


def _sequences(part: FilePart, key: str) -> Iterator[Numbered]:
    """Yield the sequences of a FASTA file whose headers start in the part, without the headers."""
    found: list[bytes] = []
    number: int | None = 0 if part.start == 0 else None
    for position, line in _lines_from(part):
        if line.startswith(b">"):
            if found and number is not None:
                yield _sequence(part, number, found, key)
            number, found = position, []
            if position >= part.stop:
                return
        elif number is not None:
            found.append(line.strip())
        elif position >= part.stop:
            return
    if found and number is not None:
        yield _sequence(part, number, found, key)


def _sequence(part: FilePart, number: int, lines: list[bytes], key: str) -> Numbered:
    content = b"".join(lines)
    return Numbered(number, {key: _decoded(part, number, content)})


def _row_groups(part: FilePart) -> Iterator[Numbered]:
    file = _parquet(part.file)
    try:
        before = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        rows = file.read_row_groups([*range(part.start, part.stop)]).to_pylist()
    except (OSError, ValueError) as error:
        where = f"{part.file.path!r}, row group {part.start}"
        raise ConfigError(f"{where}: cannot be read: {error}.") from error
    for number, row in enumerate(rows, before):
        yield Numbered(number, row)


def _rows(columns: dict[str, list[Any]], start: int) -> Iterator[Numbered]:
    names = list(columns)
    for number, values in enumerate(zip(*columns.values(), strict=True), start):
        yield Numbered(number, dict(zip(names, values, strict=True)))


def _starting_in(part: FilePart) -> tuple[int, bytes]:
    """Return the lines that start in a part, and the byte at which the first one does."""
    if part.content is not None:
        return part.start, part.content
    with Path(part.file.path).open("rb") as file:
        first = _first_line(file, part.start)
        if first >= part.stop:
            return first, b""
        content = file.read(part.stop - first)
        return first, content if content.endswith(b"\n") else content + file.readline()


def _first_line(file: BinaryIO, start: int) -> int:
    """Move to the first line that starts at or after a byte, and return where that is."""
    if start == 0:
        return 0
    file.seek(start - 1)
    return start - 1 + len(file.readline())


def _lines_from(part: FilePart) -> Iterator[tuple[int, bytes]]:
    with Path(part.file.path).open("rb") as file:
        position = _first_line(file, part.start)
        for line in file:
            yield position, line
            position += len(line)


def _decoded(part: FilePart, start: int, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{part.file.path!r}: not valid UTF-8 at byte {start + error.start}. Convert the file."
        ) from error
