"""Convert state to JSON with references to tensors, and back."""

from __future__ import annotations

import base64
import enum
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.tensor_file import METADATA, can_hold
from modelzoo_trainer.errors import CheckpointError, reason_of

_COMPILED: Final = re.compile(r"(?:^|(?<=\.))_orig_mod\.")  # inserted into names by torch.compile
WRAPPED: Final = "module."  # prefixed to names by DDP and similar wrappers


def uncompiled(name: str) -> str:
    """Return a name as in the uncompiled model."""
    return _COMPILED.sub("", name)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Map names in the unwrapped model to the given names; to themselves if ambiguous."""
    given = list(names)
    bare = [uncompiled(name) for name in given]
    if all(name.startswith(WRAPPED) for name in bare):
        bare = [name.removeprefix(WRAPPED) for name in bare]
    if len(set(bare)) < len(given):
        return {name: name for name in given}
    return dict(zip(bare, given, strict=True))


Tensors: TypeAlias = dict[str, dict[str, Tensor]]  # file stem -> name -> tensor
Json: TypeAlias = Any
Path: TypeAlias = tuple[str | int, ...]
_TAG: Final = "__type__"
_STEM: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
_MAX_INT: Final = 1 << 63  # other JSON readers may not keep larger integers
_KINDS: Final = (  # NumPy dtypes that mean the same on every machine
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def check_savable(state: Mapping[str, Any]) -> None:
    """Raise the error that `save` would raise for the values of a state.

    Raises:
        CheckpointError: If a value cannot be saved; the message has its path.
    """
    StateEncoder(state)


class StateEncoder:
    """Split a state into `state_json` for JSON and `tensors` for the tensor files.

    Dicts, lists and tuples of any class are restored as these; other values keep their type and
    all their bits. Tensors with the same memory are stored once. In the tensor files, a model's
    tensors have the names of the unwrapped module's state.

    `state`: nested mappings (of str or int), lists and tuples of tensors, numpy arrays and scalars,
    bool, int, float, str, bytes and None.

    Raises:
        CheckpointError: If a value cannot be saved; the message has its path.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: Tensors = {}
        self.state_json: dict[str, Json] = {}
        self._known: dict[tuple[Any, ...], tuple[Tensor, Json]] = {}
        self._stems: set[str] = set()
        for key, value in state.items():
            if type(key) is not str:
                raise CheckpointError(
                    f"state_dict: keys of the outermost dict must be strings, got {key!r}. Convert "
                    f"them with str()."
                )
            self._key, self._stem = key, self._new_stem(key)
            self._wrapper = WRAPPED if _is_wrapped(value) else ""
            try:
                self.state_json[key] = self._encode(value, ())
            except RecursionError:
                raise CheckpointError(
                    f"state_dict: {key} is nested too deeply, or contains itself."
                ) from None

    def _new_stem(self, key: str) -> str:
        """Return a file name for the key, unique also on case-insensitive disks."""
        fits = _STEM.fullmatch(key) and key.lower() not in self._stems
        self._stems.add(key.lower())
        return key if fits else f"part-{len(self._stems)}-{len(self.state_json)}"

    def _encode(self, value: Any, path: Path) -> Json:
        for kind, encode in _ENCODERS:
            if isinstance(value, kind):
                return encode(self, value, path)
        raise self._refusal(value, path)

    def _refusal(self, value: Any, path: Path, what: str = "") -> CheckpointError:
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
        return CheckpointError(
            f"{self._key}{''.join(parts)} is a {type(value).__name__}{what}, which cannot be "
            f"saved. Return dense tensors, numbers, strings, lists and dicts from state_dict."
        )

    def _refuse(self, value: Any, path: Path) -> Json:
        raise self._refusal(value, path)

    def _int(self, value: int, path: Path) -> Json:
        plain = int(value)
        return plain if abs(plain) < _MAX_INT else {_TAG: "int", "hex": f"{plain:x}"}

    def _float(self, value: float, path: Path) -> Json:
        plain = float(value)
        if math.isfinite(plain):
            return plain  # JSON keeps all bits
        return {_TAG: "float", "bits": struct.pack(">d", plain).hex()}

    def _scalar(self, value: np.generic, path: Path) -> Json:
        if value.dtype.name not in _KINDS:
            raise self._refusal(value, path)
        return {_TAG: "scalar", "dtype": value.dtype.name, "bits": value.tobytes().hex()}

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        keys = list(value)
        for key in keys:
            if type(key) not in (str, int):
                what = f" with the key {key!r} (neither str nor int)"
                raise self._refusal(value, path, what)
        items = [(key, self._encode(item, (*path, key))) for key, item in value.items()]
        if all(type(key) is str for key in keys) and _TAG not in keys:
            return dict(items)
        # Through the encoder as well: an integer may be too long to be written as a number.
        return {_TAG: "dict", "items": [[self._encode(key, path), item] for key, item in items]}

    def _list(self, value: list[Any], path: Path) -> Json:
        return [self._encode(item, (*path, idx)) for idx, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], path: Path) -> Json:
        return {_TAG: "tuple", "items": self._list(list(value), path)}

    def _bytes(self, value: bytes, path: Path) -> Json:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode("ascii")}

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> Json:
        fits = value.dtype.name in _KINDS and value.dtype.isnative
        if type(value) is not np.ndarray or not fits:  # subclasses may have more state
            raise self._refusal(value, path, f" of {value.dtype}")
        tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]))
        return {_TAG: "array", "tensor": self._tensor(tensor, path)}

    def _tensor(self, tensor: Tensor, path: Path) -> Json:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise self._refusal(tensor, path, f" of {tensor.layout} on {tensor.device.type}")
        storage = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.device
        bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        key = (*storage, *bits, tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and key in self._known:  # tied: stored once
            return self._known[key][1]
        plain = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            plain = torch.view_as_real(plain)
        if not can_hold(plain):
            raise self._refusal(tensor, path, f" of {tensor.dtype}")
        name = self._add(plain, path)
        kind = "complex" if tensor.is_complex() else "tensor"
        # Keep the tensor, so that its memory is not reused while this encoder lives.
        self._known[key] = tensor, {_TAG: kind, "file": self._stem, "name": name}
        return self._known[key][1]

    def _add(self, tensor: Tensor, path: Path) -> str:
        """Add a tensor to its file and return its name there: for a model, that in its state."""
        name = ".".join(map(str, path)).encode("utf-8", "replace").decode("utf-8")
        name = uncompiled(name).removeprefix(self._wrapper) or "value"
        names = self.tensors.setdefault(self._stem, {})
        while name in names or name == METADATA:
            name += "_"
        names[name] = tensor
        return name


def _is_wrapped(value: Any) -> bool:
    """Return whether all names of a state start with a wrapper's prefix."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(type(key) is str and uncompiled(key).startswith(WRAPPED) for key in value)


_Encode = Callable[[StateEncoder, Any, Path], Json]
_ENCODERS: Final[tuple[tuple[Any, _Encode], ...]] = (
    ((bool, type(None)), lambda encoder, value, path: value),
    (enum.Enum, StateEncoder._refuse),  # first: it may also be an int or str
    (np.generic, StateEncoder._scalar),
    (str, lambda encoder, value, path: str.__str__(value)),
    (int, StateEncoder._int),
    (float, StateEncoder._float),
    (Tensor, StateEncoder._tensor),
    (Mapping, StateEncoder._mapping),
    (list, StateEncoder._list),
    (tuple, StateEncoder._tuple),
    (np.ndarray, StateEncoder._array),
    (bytes, StateEncoder._bytes),
)


def decode(state_json: Mapping[str, Json], tensors: Tensors) -> dict[str, Any]:
    """Invert an `StateEncoder`.

    Raises:
        CheckpointError: If the JSON does not match the tensors.
    """
    try:
        return {key: _decode(value, tensors) for key, value in state_json.items()}
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        struct.error,
    ) as error:
        raise CheckpointError(
            f"The state in the checkpoint cannot be read: {reason_of(error)}. Use another "
            f"checkpoint."
        ) from None


def _decode(value: Json, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        if isinstance(value, int) and abs(value) >= _MAX_INT:
            raise ValueError("an integer >= 2**63 is not in the format of large integers")
        return value
    if _TAG in value:
        return _DECODERS[value[_TAG]](value, tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


def _find(value: Json, tensors: Tensors) -> Tensor:
    return tensors[value["file"]][value["name"]]


def _scalar(value: Json, tensors: Tensors) -> np.generic:
    if value["dtype"] not in _KINDS:
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    scalar: np.generic = np.frombuffer(bytes.fromhex(value["bits"]), value["dtype"])[0]
    return scalar


def _dict(value: Json, tensors: Tensors) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}


_DECODERS: Final[Mapping[str, Callable[[Json, Tensors], Any]]] = {
    "tensor": _find,
    "complex": lambda value, tensors: torch.view_as_complex(_find(value, tensors)),
    "array": lambda value, tensors: _decode(value["tensor"], tensors).numpy(),
    "scalar": _scalar,
    "int": lambda value, tensors: int(value["hex"], 16),
    "float": lambda value, tensors: struct.unpack(">d", bytes.fromhex(value["bits"]))[0],
    "bytes": lambda value, tensors: base64.b64decode(value["base64"], validate=True),
    "tuple": lambda value, tensors: tuple(_decode(item, tensors) for item in value["items"]),
    "dict": _dict,
}


_OF_A_VALUE = 16  # bytes: a number in JSON
_OF_A_TENSOR = 256  # bytes: name, type, shape and reference


def state_bytes(state: Any) -> int:
    """Estimate the size of a state on disk: exact for tensors, rough for other values.

    Tensors with the same memory count once.
    """
    total, known, waiting = 0, set(), [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            place = value.data_ptr() if value.numel() and not value.is_meta else id(value)
            key = (place, value.dtype, value.shape, value.stride())
            total += _OF_A_TENSOR + (0 if key in known else value.nbytes)
            known.add(key)
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, np.ndarray | np.generic):
            total += _OF_A_TENSOR + value.nbytes
        else:
            total += _OF_A_VALUE + (2 * len(value) if isinstance(value, str | bytes) else 0)
    return total
