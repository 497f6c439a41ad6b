"""State that user objects keep in their attributes: save it, or warn about it."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, timedelta
from enum import Enum
from io import IOBase
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, Dataset

_SCALARS: Final = (bool, int, float, str, bytes, type(None), np.number, np.bool_)
_FIXED: Final = (Enum, PurePath, date, timedelta, np.random.SeedSequence)
"""Compared, but not saved."""
_ATOMS: Final = (*_SCALARS, *_FIXED, Number, np.generic)
_GENERATORS: Final = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
_CODE: Final = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_LEFT_OUT: Final = (Module, DataLoader, IOBase, logging.Logger, logging.Handler, *_CODE)
_OURS: Final = frozenset({"modelzoo_trainer", "backends"})
_HARMLESS: Final = frozenset({"deprecation_warnings"})
"""Attributes without effect on samples. Tokenizers of transformers: which warnings were given."""
_TAG: Final = "hidden_state"


class Limits(NamedTuple):
    """Limits of a search.

    Args:
        num_bytes: Size of an array; a container may have an eighth as many items.
        num_values: Total number of values to visit.
        enters_data: Whether to visit the attributes of datasets.
    """

    num_bytes: int
    num_values: int
    enters_data: bool


OF_SAMPLERS: Final = Limits(1 << 26, 10_000, enters_data=False)
OF_DATA: Final = Limits(1 << 16, 4_000, enters_data=True)


class _Alias(str):
    """The path at which the same object was found before."""


_NOTHING: Final = object()


class Found(NamedTuple):
    """A value that may change.

    Args:
        path: Where it is, as a Python expression.
        value: The value.
        put: Replaces the value; None = it cannot be replaced.
    """

    path: str
    value: Any
    put: Callable[[Any], None] | None


def has_state(owner: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    kind = type(owner)  # instances may have `__getattr__`
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


class HiddenState:
    """State that objects keep from epoch to epoch.

    Covers attributes, also in nested objects, lists, tuples and dicts: random generators, and
    scalars, containers of scalars, arrays and tensors that have changed since construction.
    Objects with `state_dict` and `load_state_dict` are saved through these.

    Args:
        owners: The objects, by name.
        limits: How far the search goes.
        known: Objects to ignore, such as the dataset that samplers share.
    """

    def __init__(
        self, owners: Mapping[str, Any], limits: Limits, known: tuple[Any, ...] = ()
    ) -> None:
        self.owners = owners
        self._limits = limits
        self._known = known
        self._unsaved: list[str] = []
        self._is_told = False
        self._first = {
            found.path: (_digest(found.value), _encoded(found.value) if found.put else None)
            for found in self._search()
        }

    def _search(self) -> Iterator[Found]:
        return found_in(self.owners, self._limits, self._known)

    def save(self) -> dict[str, Any]:
        """Return copies of the state; empty if objects are no longer where they were."""
        saved, unsaved = {}, []
        is_moved = False
        for found in self._search():
            is_new = self._is_new(found)
            if found.put is not None and (is_new or _is_state(found.value)):
                saved[found.path] = _encoded(found.value)
            if is_new and saved.get(found.path, _NOTHING) is _NOTHING:
                unsaved.append(found.path)
                is_moved = is_moved or isinstance(found.value, _Alias)
        self._unsaved = unsaved
        return {} if is_moved else {path: one for path, one in saved.items() if one is not _NOTHING}

    def _is_new(self, found: Found) -> bool:
        return _digest(found.value) != self._first.get(found.path, (None,))[0]

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the result of `save`; return the names of values that no longer exist.

        Values that were not saved had their initial value.
        """
        left = dict(state)
        for found in list(self._search()):
            if found.put is None:
                continue
            if found.path in left:
                found.put(_decoded(left.pop(found.path), found.value))
            elif found.path in self._first and self._is_new(found):
                first = self._first[found.path][1]
                if first is not _NOTHING:
                    found.put(_decoded(first, found.value))
        return list(left)

    def newly_unsaved(self) -> list[str]:
        """Return the names of values that `save` cannot save, the first time that there are any."""
        if self._is_told or not self._unsaved:
            return []
        self._is_told = True
        return self._unsaved

    def iterators(self) -> list[str]:
        """Return the names of iterators, whose position cannot be saved."""
        return [found.path for found in self._search() if isinstance(found.value, Iterator)]

    def copied(self, owner: Any) -> Any:
        """Return a deep copy of one of the owners; ignored objects are shared.

        Raises:
            Exception: Raised by a part that cannot be copied.
        """
        shared: list[Any] = list(self._known)
        deque(found_in(self.owners, self._limits, self._known, shared), maxlen=0)
        return copy.deepcopy(owner, {id(one): one for one in shared})


def snapshot(owners: Mapping[str, Any], limits: Limits = OF_DATA) -> dict[str, tuple[int, bool]]:
    """Return, by path, the digest of each value in attributes, and whether it is a generator."""
    return {
        found.path: (_digest(found.value), isinstance(found.value, _GENERATORS))
        for found in found_in(owners, limits)
    }


def changed(
    before: Mapping[str, tuple[int, bool]], after: Mapping[str, tuple[int, bool]]
) -> list[str]:
    """Return the paths whose value has changed.

    A value that was None or missing before does not count as changed, unless it is a random
    generator.
    """
    nothing = _digest(None)
    names = []
    for path, (digest, is_generator) in after.items():
        was = before.get(path, (nothing, False))[0]
        is_made = was == nothing and not is_generator
        if digest != was and not is_made:
            names.append(path)
    return names


# ---- the search


def found_in(
    owners: Mapping[str, Any],
    limits: Limits,
    known: tuple[Any, ...] = (),
    left_out: list[Any] | None = None,
) -> Iterator[Found]:
    """Yield the values in the attributes of objects, visiting each object once.

    Args:
        owners: The objects, by name.
        limits: Limits of the search.
        known: Objects to ignore.
        left_out: Receives other ignored objects: modules, loaders, perhaps datasets.
    """
    seen = {id(owner): "" for owner in known}
    waiting = deque(Found(name, owner, _keep) for name, owner in owners.items())
    num_owners = len(waiting)
    for number in range(limits.num_values):
        if not waiting:
            return
        place = waiting.popleft()
        value = place.value
        is_atom = isinstance(value, _ATOMS)
        if id(value) in seen and not is_atom:
            if seen[id(value)]:
                yield Found(f"{place.path} is", _Alias(seen[id(value)]), None)
            continue
        seen[id(value)] = place.path
        is_own_iterator = number < num_owners and isinstance(value, Iterator)
        if _is_leaf(value, limits) and not is_own_iterator:
            yield place._replace(put=None) if isinstance(value, (Iterator, *_FIXED)) else place
        elif not _is_left_out(value, limits):
            waiting.extend(_parts(place, limits))
        elif left_out is not None:
            left_out.append(value)


def _is_left_out(value: Any, limits: Limits) -> bool:
    is_data = isinstance(value, Dataset) and not limits.enters_data
    is_ours = type(value).__module__.partition(".")[0] in _OURS
    return is_data or is_ours or isinstance(value, _LEFT_OUT)


def _parts(place: Found, limits: Limits) -> Iterator[Found]:
    value = place.value
    if not isinstance(value, _CONTAINERS):
        yield from _attributes(place.path, value)
        return
    yield Found(f"len({place.path})", len(value), None)
    if len(value) <= limits.num_bytes // 64:
        yield from _items(place.path, value)


def _is_leaf(value: Any, limits: Limits) -> bool:
    if _is_left_out(value, limits):
        return False
    if isinstance(value, (str, bytes)):
        return len(value) <= limits.num_bytes
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.is_cpu and value.layout is torch.strided
        return is_plain and value.numel() * value.element_size() <= limits.num_bytes
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.nbytes <= limits.num_bytes
    if isinstance(value, _CONTAINERS):
        return len(value) <= limits.num_bytes // 8 and _holds_scalars(value)
    return isinstance(value, (*_ATOMS, *_GENERATORS, Iterator)) or has_state(value)


def _holds_scalars(container: Any) -> bool:
    if isinstance(container, dict):
        keys = all(type(key) in (str, int) for key in container)
        return keys and all(isinstance(item, _SCALARS) for item in container.values())
    return all(isinstance(item, _SCALARS) for item in container)


def _items(path: str, container: Any) -> Iterator[Found]:
    if isinstance(container, dict):
        for key, item in container.items():
            yield Found(f"{path}[{key!r}]", item, _putter(container.__setitem__, key))
    elif isinstance(container, (list, deque)):
        for idx, item in enumerate(container):
            yield Found(f"{path}[{idx}]", item, _putter(container.__setitem__, idx))
    elif isinstance(container, tuple):
        for idx, item in enumerate(container):
            yield Found(f"{path}[{idx}]", item, _in_place(item))


def _attributes(path: str, owner: Any) -> Iterator[Found]:
    names = list(getattr(owner, "__dict__", ()))
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for name in names:
        value = _attribute(owner, name)
        if not name.startswith("__") and name not in _HARMLESS and value is not _NOTHING:
            place = f"{path}.{name}" if path else name
            yield Found(place, value, _putter(_setter_of(owner), name))


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, _NOTHING)
    except Exception:  # noqa: BLE001  # a user's property may raise anything
        return _NOTHING


def _setter_of(owner: Any) -> Callable[[Any, Any], None]:
    return lambda name, value: object.__setattr__(owner, name, value)


def _putter(put: Callable[[Any, Any], None], key: Any) -> Callable[[Any], None]:
    return lambda value: put(key, value)


def _in_place(item: Any) -> Callable[[Any], None] | None:
    """Return a no-op, for an item of a tuple that is restored in place."""
    return _keep if _is_state(item) or isinstance(item, (list, deque)) else None


def _keep(value: Any) -> None:
    """Do nothing: the object's state has been restored in place."""


# ---- values


def _is_state(value: Any) -> bool:
    """Return whether a value is always saved, because users do not set it directly."""
    return isinstance(value, _GENERATORS) or has_state(value)


def _digest(value: Any) -> int:
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


def _encoded(value: Any) -> Any:
    """Convert a value for a checkpoint; `_NOTHING` if that is not possible."""
    try:
        return _copied(value)
    except Exception:  # noqa: BLE001  # a user's class may raise anything
        return _NOTHING


def _copied(value: Any) -> Any:
    for kinds, copied in _COPY:
        if isinstance(value, kinds):
            return copied(value)
    for kinds, state_of in _STATE_OF:
        if isinstance(value, kinds):
            return {_TAG: state_of(value), "kind": _kind(value)}
    if has_state(value):
        return {_TAG: copy.deepcopy(value.state_dict()), "kind": _kind(value)}
    return _NOTHING


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


def _decoded(saved: Any, present: Any) -> Any:
    """Invert `_encoded`; mutable objects are restored in place."""
    is_tagged = isinstance(saved, dict) and saved.keys() == {_TAG, "kind"}
    state = copy.deepcopy(saved[_TAG] if is_tagged else saved)
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
