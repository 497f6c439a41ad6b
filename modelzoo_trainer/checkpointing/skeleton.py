"""State as JSON with references to tensors, and back."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.errors import CheckpointError

Tensors: TypeAlias = dict[str, dict[str, Tensor]]  # file stem -> name -> tensor
Json: TypeAlias = Any
_TAG = "__type__"


class Encoder:
    """Takes a state apart: `skeleton` for JSON, `tensors` for the tensor files.

    Args:
        state: Nested mappings, lists and tuples of tensors, arrays, numbers, strings, bytes, None.

    Raises:
        CheckpointError: If something in it cannot be saved; the message has its path.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: Tensors = {}
        self._known: dict[tuple[Any, ...], Json] = {}
        self._stem = ""
        self.skeleton: dict[str, Json] = {}
        for key, value in state.items():
            if not isinstance(key, str) or not key.replace("_", "").isalnum():
                raise CheckpointError(f"the state's key {key!r} cannot name a file.")
            self._stem = key
            self.skeleton[key] = self._encode(value, ())

    def _encode(self, value: Any, path: tuple[str | int, ...]) -> Json:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            items = [self._encode(item, (*path, idx)) for idx, item in enumerate(value)]
            return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: tuple[str | int, ...]) -> Json:
        if value is None or isinstance(value, bool):
            return value
        for kinds, convert in _SCALARS:
            if isinstance(value, kinds):
                return convert(value)
        raise CheckpointError(
            f"{self._name(path)} is a {type(value).__name__}, which cannot be saved. Return "
            f"tensors, numbers, strings, lists and dicts from state_dict."
        )

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str | int, ...]) -> Json:
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: self._encode(item, (*path, key)) for key, item in value.items()}
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (int, str)):
                raise CheckpointError(f"{self._name(path)} has the key {key!r}; use str or int.")
        return {
            _TAG: "dict",
            "items": [[key, self._encode(item, (*path, key))] for key, item in value.items()],
        }

    def _array(self, value: np.ndarray[Any, Any], path: tuple[str | int, ...]) -> Json:
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError:
            raise CheckpointError(
                f"{self._name(path)} is an array of {value.dtype}, which cannot be saved."
            ) from None
        return {_TAG: "array", "tensor": self._tensor(tensor, path)}

    def _tensor(self, tensor: Tensor, path: tuple[str | int, ...]) -> Json:
        tensor = tensor.detach()
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype)
        key = (*place, tuple(tensor.shape), tuple(tensor.stride()))
        known = self._known.get(key) if tensor.numel() else None
        if known is not None:  # tied: stored once
            return known
        name = ".".join(map(str, path)) or "value"
        names = self.tensors.setdefault(self._stem, {})
        while name in names:
            name += "_"
        names[name] = tensor
        self._known[key] = {_TAG: "tensor", "file": self._stem, "name": name}
        return self._known[key]

    def _name(self, path: tuple[str | int, ...]) -> str:
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
        return self._stem + "".join(parts)


def decode(skeleton: Mapping[str, Json], tensors: Tensors) -> dict[str, Any]:
    """Return the state that an `Encoder` took apart.

    Raises:
        CheckpointError: If the skeleton does not fit the tensors.
    """
    try:
        return {key: _decode(value, tensors) for key, value in skeleton.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's state cannot be read: {error!r}.") from None


def _decode(value: Json, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _decode(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["file"]][value["name"]]
    if kind == "float":
        return float.fromhex(value["hex"])
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    return _decode_container(kind, value, tensors)


def _decode_container(kind: str, value: dict[str, Json], tensors: Tensors) -> Any:
    if kind == "array":
        return _decode(value["tensor"], tensors).numpy()
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in value["items"])
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in value["items"]}
    raise ValueError(f"unknown type {kind!r}")


def _float(value: float) -> Json:
    """Return a finite float as it is (JSON keeps all its bits), another one tagged."""
    return value if math.isfinite(value) else {_TAG: "float", "hex": value.hex()}


def _bytes(value: bytes) -> Json:
    return {_TAG: "bytes", "base64": base64.b64encode(value).decode("ascii")}


_SCALARS: Final[tuple[tuple[Any, Callable[[Any], Json]], ...]] = (
    (str, str),
    ((int, np.integer), int),
    ((float, np.floating), lambda value: _float(float(value))),
    (bytes, _bytes),
)


def tensor_files(tensors: Tensors) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each tensor file's name and its tensors, contiguous and each with its own memory."""
    for stem, names in tensors.items():
        yield (
            f"{stem}.safetensors",
            {name: tensor.cpu().contiguous().clone() for name, tensor in names.items()},
        )
