"""Values in the attributes of user objects: compare, copy for a checkpoint, restore."""

from __future__ import annotations

import copy
import pickle
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

GENERATORS: Final = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
NOTHING: Final = object()
TAG: Final = "hidden_state"
NONE: Final = zlib.crc32(pickle.dumps(None, protocol=5))
"""The digest of None."""


def has_state(owner: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    kind = type(owner)  # instances may have `__getattr__`
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


def is_state(value: Any) -> bool:
    """Return whether a value is always saved, because users do not set it directly."""
    return isinstance(value, GENERATORS) or has_state(value)


def digest_of(value: Any) -> int:
    """Return a checksum of a value; 0 if it cannot be serialized."""
    try:
        return zlib.crc32(pickle.dumps(_plain(value), protocol=5))
    except Exception:  # noqa: BLE001  # a user's class may raise anything
        return 0


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if isinstance(value, Tensor):
        return value.detach().numpy() if value.dtype is not torch.bfloat16 else value.tolist()
    if isinstance(value, Iterator):
        return None
    return value.state_dict() if has_state(value) else value


def same(saved: Any, present: Any) -> bool:
    """Return whether two results of `encoded` are equal."""
    if isinstance(saved, dict) and isinstance(present, dict):
        return saved.keys() == present.keys() and all(same(saved[k], present[k]) for k in saved)
    if isinstance(saved, (list, tuple, np.ndarray, Tensor)):
        return isinstance(present, (list, tuple, np.ndarray, Tensor)) and bool(
            np.array_equal(np.asarray(saved), np.asarray(present))
        )
    return bool(type(saved) is type(present) and saved == present)


def encoded(value: Any) -> Any:
    """Convert a value for a checkpoint; `NOTHING` if that is not possible."""
    try:
        return _copied(value)
    except Exception:  # noqa: BLE001  # a user's class may raise anything
        return NOTHING


def _copied(value: Any) -> Any:
    for kinds, copied in _COPY:
        if isinstance(value, kinds):
            return copied(value)
    for kinds, state_of in _STATE_OF:
        if isinstance(value, kinds):
            return {TAG: state_of(value), "kind": _kind(value)}
    if has_state(value):
        return {TAG: copy.deepcopy(value.state_dict()), "kind": _kind(value)}
    return NOTHING


def _kind(value: Any) -> str:
    return "torch.Generator" if isinstance(value, torch.Generator) else type(value).__name__


def _python_state(generator: random.Random) -> Any:
    version, numbers, gauss = generator.getstate()
    return [version, np.array(numbers, dtype=np.int64), gauss]


def _as_array(numbers: list[Any]) -> Any:
    """Convert a long list of integers to an array; copy others."""
    if len(numbers) > _LONG and all(type(item) is int for item in numbers):
        try:
            return np.array(numbers, dtype=np.int64)
        except OverflowError:
            pass
    return list(numbers)


def decoded(saved: Any, present: Any) -> Any:
    """Invert `_encoded`; mutable objects are restored in place."""
    is_tagged = isinstance(saved, dict) and saved.keys() == {TAG, "kind"}
    state = copy.deepcopy(saved[TAG] if is_tagged else saved)
    if is_tagged and _kind(present) != saved["kind"] and saved["kind"] in _MAKE:
        present = _MAKE[saved["kind"]]()
    for kinds, restore in _RESTORE:
        if isinstance(present, kinds):
            restore(present, state)
            return present
    if isinstance(present, (frozenset, tuple)):
        return type(present)(state)
    if isinstance(present, np.ndarray) and present.flags.writeable and _fits(state, present):
        present[...] = state
        return present
    if isinstance(present, Tensor) and _fits(state, present):
        present.detach().copy_(torch.as_tensor(state))
        return present
    if is_tagged and has_state(present):
        present.load_state_dict(state)
        return present
    return state


def _fits(state: Any, present: Any) -> bool:
    return bool(getattr(state, "shape", None) == present.shape)


def _restore_python(generator: random.Random, state: Any) -> None:
    version, numbers, gauss = state
    generator.setstate((int(version), tuple(int(number) for number in numbers), gauss))


def _restore_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _restore_list(target: list[Any], state: Any) -> None:
    target[:] = state.tolist() if isinstance(state, np.ndarray) else state


def _refill(target: Any, state: Any) -> None:
    target.clear()
    (target.extend if isinstance(target, deque) else target.update)(state)


_LONG: Final = 64
_MAKE: Final[dict[str, Callable[[], Any]]] = {
    "Random": random.Random,
    "RandomState": np.random.RandomState,
    "Generator": lambda: np.random.default_rng(),
    "torch.Generator": torch.Generator,
    "list": list,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "tuple": tuple,
    "deque": deque,
}
_COPY: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (Tensor, lambda value: value.detach().clone()),
    (np.ndarray, np.copy),
    ((np.number, np.bool_), lambda value: value.item()),
    (str, str),
    (bytes, bytes),
    ((bool, int, float, type(None)), lambda value: value),
)
_STATE_OF: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (random.Random, _python_state),
    (np.random.RandomState, lambda value: copy.deepcopy(value.get_state(legacy=False))),
    (np.random.Generator, lambda value: copy.deepcopy(value.bit_generator.state)),
    (torch.Generator, lambda value: value.get_state()),
    (list, _as_array),
    (dict, dict),
    ((set, frozenset, deque, tuple), list),
)
_RESTORE: Final[tuple[tuple[Any, Callable[[Any, Any], None]], ...]] = (
    (random.Random, _restore_python),
    (np.random.RandomState, lambda generator, state: generator.set_state(state)),
    (np.random.Generator, _restore_numpy),
    (torch.Generator, lambda generator, state: generator.set_state(state)),
    (list, _restore_list),
    ((deque, set, dict), _refill),
)
