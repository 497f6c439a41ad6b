"""The header of a safetensors file, read without the data and without torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

METADATA: Final = "__metadata__"
LENGTH_BYTES: Final = 8
DTYPES: Final[Mapping[str, tuple[str, int]]] = {  # torch's name, bytes
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library
_MAX_DIMS: Final = 64  # the limit of torch
_MAX_COUNT: Final = 1 << 63


class Readable(Protocol):
    """Source of a header."""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; fewer only at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a file."""

    dtype: str  # torch's name, such as "float32"
    shape: tuple[int, ...]
    begin: int  # first byte, from the start of the data
    end: int  # the byte after its last

    @property
    def num_bytes(self) -> int:
        """Return its size in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Content of a file."""

    tensors: dict[str, TensorEntry]  # by name, in the order of their bytes
    metadata: dict[str, str]  # what the writer added
    data_start: int  # offset of the data in the file


def read_header(file: Readable, size: int) -> Header:
    """Read and check a file's header; leaves the file at the start of the data.

    Raises:
        ValueError: If it is not a safetensors file, or its tensors have gaps or overlaps.
        OSError: If it cannot be read.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or not 0 < length <= min(size - LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError("it is not a safetensors file, or it is truncated (no valid header)")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("the file is truncated (ends inside its header)")
    return parse_header(text, size)


def parse_header(text: bytes, size: int) -> Header:
    """Parse a header.

    Raises:
        ValueError: As `read_header`.
    """
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(raw, dict):
        raise ValueError("the header is not a JSON object")
    metadata = raw.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{METADATA} in the header is not a JSON object of strings")
    tensors = {name: _entry(name, value) for name, value in raw.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    start = LENGTH_BYTES + len(text)
    _check_filled(ordered, size - start)
    return Header(tensors=dict(ordered), metadata=metadata, data_start=start)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the header has the name {name!r} twice")
    return found


def _entry(name: str, value: Any) -> TensorEntry:
    is_entry = isinstance(value, dict) and {"dtype", "shape", "data_offsets"} <= value.keys()
    if not is_entry or not isinstance(value["dtype"], str):
        raise ValueError(
            f"the header has an invalid entry for tensor {name!r}; the file is damaged"
        )
    known = DTYPES.get(value["dtype"])
    if known is None:
        known_names = ", ".join(DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {value['dtype']!r}; supported: {known_names}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"tensor {name!r} has an invalid shape {shape!r} or offsets {offsets!r}; the file is "
            f"damaged"
        )
    dtype, itemsize = known
    if offsets[1] - offsets[0] != prod(shape) * itemsize:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and {dtype} does not match its offsets {offsets}; "
            f"the file is damaged"
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _are_counts(value: Any) -> bool:
    is_short = isinstance(value, list) and len(value) <= _MAX_DIMS
    return is_short and all(type(item) is int and 0 <= item < _MAX_COUNT for item in value)


def _check_filled(ordered: list[tuple[str, TensorEntry]], num_bytes: int) -> None:
    end = 0
    for name, entry in ordered:
        if entry.begin != end:
            raise ValueError(
                f"tensor {name!r} starts at byte {entry.begin} of the data, expected {end}; the "
                f"file is damaged"
            )
        end = entry.end
    if end != num_bytes:
        raise ValueError(
            f"the file has {num_bytes} bytes of data, expected {end}; it is truncated or damaged"
        )
