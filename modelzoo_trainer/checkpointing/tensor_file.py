"""Writing the safetensors format: the length of a JSON header, the header, each tensor's bytes.

Done here, not by the library: so digests are taken from the bytes on their way to the disk, files
get the mode of the umask, and no more than one block of a tensor is in memory besides the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.tensor_header import DTYPES, LENGTH_BYTES
from modelzoo_trainer.checkpointing.tensor_header import METADATA as METADATA

_NAMES: Final = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
_BLOCK: Final = 1 << 24  # bytes: what is copied at once of a tensor that cannot be written as it is


def can_hold(tensor: Tensor) -> bool:
    """Return whether a file can hold such a tensor; of complex ones, a view as real numbers."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.dtype in _NAMES and not tensor.is_complex()


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
    """Yield a tensor's bytes: all at once, or as many as may be copied at once."""
    is_here = not tensor.numel() or tensor.device == torch.empty(0).device
    if tensor.nbytes <= _BLOCK or (is_here and tensor.is_contiguous()):
        yield as_bytes(tensor.cpu().contiguous())
    elif len(tensor) == 1:
        yield from _blocks(tensor[0])
    else:
        for part in torch.split(tensor, max(1, _BLOCK * len(tensor) // tensor.nbytes)):
            yield from _blocks(part)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host."""
    # A single element is contiguous whatever its strides are, but a view as bytes wants 1.
    flat: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)
