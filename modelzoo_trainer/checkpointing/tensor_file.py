"""The data of safetensors files: write it, and read it once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import CheckedFile, open_checked
from modelzoo_trainer.checkpointing.manifest import FileRecord
from modelzoo_trainer.checkpointing.tensor_header import (
    DTYPES,
    LENGTH_BYTES,
    Header,
    TensorEntry,
    read_header,
)
from modelzoo_trainer.checkpointing.tensor_header import METADATA as METADATA

_NAMES: Final = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
_BLOCK: Final = 1 << 24  # bytes of a tensor copied at a time if it is not contiguous on the host


def can_hold(tensor: Tensor) -> bool:
    """Return whether a file can store a tensor; complex ones only as a real view."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.dtype in _NAMES and not tensor.is_complex()


def bytes_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with `tensors`, copying as little as possible.

    `tensors`: by name; each must pass `can_hold`. `metadata`: further entries of the metadata.
    """
    # Widest dtype first, so that all tensors are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {METADATA: {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype, shape = _NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % LENGTH_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little")
    yield text
    for _, tensor in ordered:
        yield from _blocks(tensor.detach())


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes: at once if possible, else block by block."""
    is_here = not tensor.numel() or tensor.device == torch.empty(0).device
    if tensor.nbytes <= _BLOCK or (is_here and tensor.is_contiguous()):
        yield as_bytes(tensor.cpu().contiguous())
    elif len(tensor) == 1:
        yield from _blocks(tensor[0])
    else:
        for part in torch.split(tensor, max(1, _BLOCK * len(tensor) // tensor.nbytes)):
            yield from _blocks(part)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    # A single element is contiguous whatever its strides are, but a view as bytes requires 1.
    flat: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


_PIECE: Final = 1 << 18  # bytes per read, hashed while they are in the cache


def checked_tensors(
    path: Path, record: FileRecord | None, wanted: Callable[[str], bool]
) -> Iterator[tuple[Header, str, Tensor]]:
    """Yield tensors of a file, each in its own host memory.

    Nothing is verified before the iterator is exhausted: the digest covers the whole file.

    `record`: the size and digest when written; None = not known. `wanted`: which tensors to yield;
    the others are verified as well.

    Returns:
        The file's header, a name, its tensor.

    Raises:
        CheckpointError: If it does not match the record, or is not a safetensors file.
    """
    with open_checked(path, record) as file:
        header = read_header(file, file.size)
        rest = memoryview(bytearray(min(_PIECE, file.size)))
        for name, entry in header.tensors.items():
            if wanted(name):
                yield header, name, _read(file, entry)
            else:
                _skip(file, entry.num_bytes, rest)
        file.finish()


def _read(file: CheckedFile, entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    view = as_bytes(tensor)
    for begin in range(0, len(view), _PIECE):
        file.read_into(view[begin : begin + _PIECE])
    return tensor


def _skip(file: CheckedFile, num_bytes: int, rest: memoryview) -> None:
    for begin in range(0, num_bytes, len(rest)):
        file.read_into(rest[: num_bytes - begin])
