"""The safetensors format: the length of a JSON header, the header, the bytes of each tensor.

Written and read here, not by the library: so digests are taken from the bytes on their way to the
disk, files get the mode of the umask, and a loaded tensor is read straight into its own memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
METADATA: Final = "__metadata__"  # a key of the header, so no tensor can be called that
_LENGTH_BYTES: Final = 8


def can_hold(tensor: Tensor) -> bool:
    """Return whether a file can hold such a tensor; of complex ones, a view as real numbers."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.dtype in _NAMES


def bytes_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file that holds `tensors`; none is copied that need not be.

    Args:
        tensors: By name; `can_hold` each.
    """
    # The widest first, so that all of them are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.itemsize
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _LENGTH_BYTES)
    yield len(text).to_bytes(_LENGTH_BYTES, "little")
    yield text
    for _, tensor in ordered:
        yield _as_bytes(tensor.detach().cpu().contiguous())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, by name, each in memory of its own.

    Raises:
        ValueError: If the header does not fit the file; a malformed one may also raise KeyError,
            TypeError or RecursionError.
        OSError: If it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if start > size:
            raise ValueError(f"the header of {path.name!r} is longer than the file")
        header = json.loads(file.read(start - _LENGTH_BYTES))
        header.pop(METADATA, None)
        return {name: _read(file, start, size, entry) for name, entry in header.items()}


def _read(file: BufferedReader, start: int, size: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    begin, end = entry["data_offsets"]
    has_bounds = 0 <= begin <= end <= size - start and all(length >= 0 for length in shape)
    if not has_bounds or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} does not fit bytes {begin} to {end}")
    tensor = torch.empty(shape, dtype=dtype)
    file.seek(start + begin)
    if file.readinto(_as_bytes(tensor)) != end - begin:
        raise ValueError("the file ends within a tensor")
    return tensor


def _as_bytes(tensor: Tensor) -> memoryview:
    # A single element is contiguous whatever its strides are, but a view as bytes wants 1.
    flat: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)
