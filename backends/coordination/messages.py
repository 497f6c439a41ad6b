"""Encode values as bytes for other ranks: JSON followed by the bytes of tensors; no pickle."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..errors import BackendError

_LENGTH: Final = 8  # bytes of the length of the JSON text
_KINDS: Final = ("tuple", "dict", "path", "ellipsis", "bytes", "array", "tensor")
_NUMBERS: Final = "biufc"  # kinds of NumPy dtypes


def pack(value: Any) -> bytes:
    """Encode a value as bytes.

    Supported: None, bool, int, float, str, bytes, Path, Ellipsis, tensors, NumPy arrays and
    scalars; lists, tuples and dicts of these. Subclasses are sent as the base type.

    Raises:
        BackendError: If the value contains another type.
    """
    blobs: list[bytes] = []
    text = json.dumps(_plain(value, blobs)).encode("ascii")
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *blobs])


def unpack(content: bytes) -> Any:
    """Decode the result of `pack`; tensors are on the device of their kind."""
    start = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    return _Reader(content, start).value(json.loads(content[_LENGTH:start]))


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """Convert a value to JSON; unsupported types become a dict with their kind as its only key."""
    found: Any = None
    if isinstance(value, bool | int | float | str | None) and not isinstance(value, Enum):
        found = value
    elif isinstance(value, list):
        found = [_plain(item, blobs) for item in value]
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        found = {"tuple": [_plain(item, blobs) for item in value]}
    elif isinstance(value, dict):
        found = {"dict": [[_plain(k, blobs), _plain(v, blobs)] for k, v in value.items()]}
    elif isinstance(value, PurePath):
        found = {"path": str(value)}
    elif value is ...:
        found = {"ellipsis": None}
    else:
        found = _packed(value, blobs)
    return found


def _packed(value: Any, blobs: list[bytes]) -> dict[str, Any]:
    """Return the header of a value whose bytes follow the JSON text."""
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"array": [value.dtype.str, list(value.shape), isinstance(value, np.generic)]}
    is_whole = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if is_whole and not value.is_quantized and not value.is_meta:
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        blobs.append(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        name = str(whole.dtype).removeprefix("torch.")
        return {"tensor": [name, list(value.shape), value.device.type]}
    raise BackendError(
        f"An object of type {type(value).__name__} cannot be sent to other processes (without "
        f"pickle). Send None, bool, int, float, str, bytes, Path, tensors or NumPy arrays, and "
        f"lists, tuples and dicts of them."
    )


class _Reader:
    """Read the bytes after the JSON text, in order."""

    def __init__(self, content: bytes, start: int) -> None:
        self._content = content
        self._start = start

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        [(kind, header)] = plain.items()
        if kind not in _KINDS:
            raise BackendError(
                f"Received a value of unknown kind {kind!r} from another process. All processes "
                f"must run the same version of modelzoo_trainer."
            )
        return getattr(self, f"_{kind}")(header)

    def _take(self, num_bytes: int) -> bytes:
        begin, self._start = self._start, self._start + num_bytes
        return self._content[begin : self._start]

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self.value(item) for item in items)

    def _dict(self, pairs: list[list[Any]]) -> dict[Any, Any]:
        return {self.value(key): self.value(value) for key, value in pairs}

    def _path(self, text: str) -> Path:
        return Path(text)

    def _ellipsis(self, _: None) -> Any:
        return ...

    def _bytes(self, num_bytes: int) -> bytes:
        return self._take(num_bytes)

    def _array(self, header: list[Any]) -> Any:
        dtype, shape, is_number = np.dtype(header[0]), header[1], header[2]
        content = self._take(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        array = np.frombuffer(content, dtype).reshape(shape).copy()
        return array[()] if is_number else array

    def _tensor(self, header: list[Any]) -> Tensor:
        dtype, shape, device = getattr(torch, header[0]), header[1], header[2]
        content = self._take(dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        found = torch.empty(shape, dtype=dtype, device="cpu")
        if content:
            bytes_of = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
            found.reshape(-1).view(torch.uint8).copy_(bytes_of)
        return found.to(device)
