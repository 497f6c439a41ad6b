"""Reading the tensors of a file in one pass, those that are wanted and the digest of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import CheckedFile, open_checked
from modelzoo_trainer.checkpointing.manifest import FileRecord
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.tensor_header import Header, TensorEntry, read_header

_PIECE: Final = 1 << 18  # bytes: read, and hashed while they are in the processor's cache


def checked_tensors(
    path: Path, record: FileRecord | None, wanted: Callable[[str], bool]
) -> Iterator[tuple[Header, str, Tensor]]:
    """Yield tensors of a file, each in host memory of its own.

    Nothing that was yielded is known to be right before the iterator has ended: the digest is
    that of the whole file.

    Args:
        path: The file.
        record: What was written; None = nobody knows.
        wanted: Which tensors to yield; the bytes of the others are checked all the same.

    Returns:
        The file's header, a name, its tensor.

    Raises:
        CheckpointError: If it is not what was written, or no safetensors file.
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
