"""State that user objects keep in their attributes: save it, or warn about it."""

from __future__ import annotations

import copy
import logging
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date, timedelta
from enum import Enum
from functools import partial
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

from modelzoo_trainer.loading.attribute_values import (
    GENERATORS,
    NONE,
    NOTHING,
    decoded,
    digest_of,
    encoded,
    has_state,
    is_state,
    same,
)

_SCALARS: Final = (bool, int, float, str, bytes, type(None), np.number, np.bool_)
_FIXED: Final = (Enum, PurePath, date, timedelta, np.random.SeedSequence)
"""Compared, but not saved."""
_ATOMS: Final = (*_SCALARS, *_FIXED, Number, np.generic)
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
_CODE: Final = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_LEFT_OUT: Final = (Module, DataLoader, IOBase, logging.Logger, logging.Handler, *_CODE)
_CLOSURES: Final = (FunctionType, MethodType)
_OURS: Final = frozenset({"modelzoo_trainer", "backends"})
_READERS: Final = frozenset(
    [
        *("PIL", "duckdb", "fsspec", "gzip", "h5py", "lmdb", "netCDF4", "pandas", "polars"),
        *("pyarrow", "rasterio", "sqlite3", "tables", "tarfile", "tifffile", "xarray", "zarr"),
        *("zipfile", "asyncio", "concurrent", "multiprocessing", "queue", "threading"),
    ]
)
"""Packages whose objects change while data are read, without effect on what is read."""
_PASSED: Final = _OURS | _READERS
_STANDARD: Final = frozenset({*sys.stdlib_module_names, "numpy", "torch"}) - {"__main__"}
"""Packages whose classes have constants, but no state."""
_OF_CLASS: Final = (*_ATOMS, *GENERATORS, *_CONTAINERS, np.ndarray, Tensor)
"""Attributes of a class that an object may change, or replace by its own."""
_HARMLESS: Final = frozenset({"deprecation_warnings"})
"""Attributes without effect on samples. Tokenizers of transformers: which warnings were given."""


class SearchLimits(NamedTuple):
    """Limits of a search.

    Args:
        num_bytes: Size of an array; a container may have an eighth as many items.
        num_values: Total number of values to visit.
        enters_data: Whether to visit the attributes of datasets.
        only_compares: Whether values are only compared within this process: also large ones, and
            what functions keep in closures.
    """

    num_bytes: int
    num_values: int
    enters_data: bool
    only_compares: bool = False


OF_SAMPLERS: Final = SearchLimits(1 << 26, 10_000, enters_data=False)
OF_DATA: Final = SearchLimits(1 << 16, 4_000, enters_data=True)
OF_LOADING: Final = OF_DATA._replace(only_compares=True)


class _Alias(str):
    """The path at which the same object was found before."""


class Found(NamedTuple):
    """A value that may change.

    Args:
        path: Where it is, as a Python expression.
        value: The value.
        put: Replaces the value; None = it cannot be replaced.
        within: The paths of the objects around it, outermost first.
    """

    path: str
    value: Any
    put: Callable[[Any], None] | None
    within: tuple[str, ...] = ()


class Seen(NamedTuple):
    """What is kept of a value to compare it later.

    Args:
        digest: Of the value.
        is_generator: Whether it is a random generator.
        within: See `Found`.
    """

    digest: int
    is_generator: bool
    within: tuple[str, ...]


Snapshot = Mapping[str, Seen]


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
        self, owners: Mapping[str, Any], limits: SearchLimits, known: tuple[Any, ...] = ()
    ) -> None:
        self.owners = owners
        self._limits = limits
        self._known = known
        self.unsaved: list[str] = []
        """Values that the latest `save` could not save."""
        self._is_told = False
        found = list(self._search())
        self._before = {one.path: _seen(one) for one in found}
        self._first = {one.path: encoded(one.value) if one.put else None for one in found}

    def _search(self) -> Iterator[Found]:
        return found_in(self.owners, self._limits, self._known)

    def save(self) -> dict[str, Any]:
        """Return copies of the state; empty if objects are no longer where they were."""
        saved, unsaved = {}, []
        is_moved = False
        for found in self._search():
            is_new = self._is_new(found)
            if found.put is not None and (is_new or is_state(found.value)):
                saved[found.path] = encoded(found.value)
            if is_new and saved.get(found.path, NOTHING) is NOTHING:
                unsaved.append(found.path)
                is_moved = is_moved or isinstance(found.value, _Alias)
        self.unsaved = unsaved
        return {} if is_moved else {path: one for path, one in saved.items() if one is not NOTHING}

    def _is_new(self, found: Found) -> bool:
        known = self._before.get(found.path)
        return known is None or digest_of(found.value) != known.digest

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the result of `save`; return the names of values that no longer exist.

        Values that were not saved had their initial value.
        """
        left = dict(state)
        for found in list(self._search()):
            if found.put is None:
                continue
            if found.path in left:
                found.put(decoded(left.pop(found.path), found.value))
            elif found.path in self._first and self._is_new(found):
                first = self._first[found.path]
                if first is not NOTHING:
                    found.put(decoded(first, found.value))
        return list(left)

    def newly_unsaved(self) -> list[str]:
        """Return the names of values that `save` cannot save, the first time that there are any."""
        if self._is_told or not self.unsaved:
            return []
        self._is_told = True
        return self.unsaved

    def newly_lost(self) -> list[str]:
        """Return likewise what has changed by now, except attributes that were only made."""
        names = set(changed(self._before, {one.path: _seen(one) for one in self._search()}))
        self.save()
        self.unsaved = [name for name in self.unsaved if name in names]
        return self.newly_unsaved()

    def differing(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of saved values that are missing now, or others."""
        present = {found.path: encoded(found.value) for found in self._search()}
        return [path for path, saved in state.items() if not same(saved, present.get(path))]

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


def snapshot(owners: Mapping[str, Any], limits: SearchLimits = OF_DATA) -> Snapshot:
    """Return, by path, what to compare the values in attributes with later."""
    return {found.path: _seen(found) for found in found_in(owners, limits)}


def _seen(found: Found) -> Seen:
    return Seen(digest_of(found.value), isinstance(found.value, GENERATORS), found.within)


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the paths whose value has changed.

    An attribute that was None or missing before has been made, such as an open file, which is not
    a change, unless it is a random generator; if it is state, it changes again later. A container
    that was empty has changed.
    """
    names: dict[str, None] = {}
    for path, seen in after.items():
        if path in before:
            is_changed = seen.digest != before[path].digest
            is_made = before[path].digest == NONE
        else:
            is_changed = True
            is_made = _is_made(seen, before)
        if is_changed and (seen.is_generator or not is_made):
            names[path] = None
    gone = [seen for path, seen in before.items() if path not in after]
    names |= {path: None for seen in gone for path in seen.within if path in after}
    return [path for path in names if not any(map(names.__contains__, _lengths(path, after)))]


def _lengths(path: str, after: Snapshot) -> list[str]:
    """Return the paths of the lengths of the containers around a value."""
    lengths = [f"len({around})" for around in after[path].within]
    return [length for length in lengths if length != path]


def _is_made(seen: Seen, before: Snapshot) -> bool:
    """Return whether a new value is within an attribute that was None or missing before."""
    around = next((path for path in reversed(seen.within) if path in before), None)
    return around is None or before[around].digest == NONE


# ---- the search


def found_in(
    owners: Mapping[str, Any],
    limits: SearchLimits,
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
            within = (*place.within, place.path)
            waiting.extend(part._replace(within=within) for part in _parts(place, limits))
        elif left_out is not None:
            left_out.append(value)


def _is_left_out(value: Any, limits: SearchLimits) -> bool:
    if limits.only_compares and isinstance(value, _CLOSURES):
        return False
    is_data = isinstance(value, Dataset) and not limits.enters_data
    is_known = type(value).__module__.partition(".")[0] in _PASSED
    return is_data or is_known or isinstance(value, _LEFT_OUT)


def _parts(place: Found, limits: SearchLimits) -> Iterator[Found]:
    value = place.value
    if limits.only_compares:
        mark = mark_of(value, limits.num_bytes // 64)
        if mark is not None:
            yield Found(f"content of {place.path}", mark, None)
        yield from kept_by_code(place.path, value)
    if not isinstance(value, _CONTAINERS):
        yield from _attributes(place.path, value)
        return
    yield Found(f"len({place.path})", len(value), None)
    if len(value) <= limits.num_bytes // 64:
        yield from _items(place.path, value)


def _is_leaf(value: Any, limits: SearchLimits) -> bool:
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
    return isinstance(value, (*_ATOMS, *GENERATORS, Iterator)) or has_state(value)


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
        if kind.__module__.partition(".")[0] not in _STANDARD:
            names += [name for name, value in kind.__dict__.items() if isinstance(value, _OF_CLASS)]
    for name in dict.fromkeys(names):
        value = _attribute(owner, name)
        if not name.startswith("__") and name not in _HARMLESS and value is not NOTHING:
            place = f"{path}.{name}" if path else name
            yield Found(place, value, _putter(_setter_of(owner), name))


def _attribute(owner: Any, name: str) -> Any:
    try:
        value = getattr(owner, name, NOTHING)
        return value if value.__class__ else NOTHING  # a dead proxy has none
    except Exception:  # noqa: BLE001  # a user's property may raise anything
        return NOTHING


def _setter_of(owner: Any) -> Callable[[Any, Any], None]:
    return lambda name, value: object.__setattr__(owner, name, value)


def _putter(put: Callable[[Any, Any], None], key: Any) -> Callable[[Any], None]:
    return lambda value: put(key, value)


def _in_place(item: Any) -> Callable[[Any], None] | None:
    """Return a no-op, for an item of a tuple that is restored in place."""
    return _keep if is_state(item) or isinstance(item, (list, deque)) else None


def _keep(value: Any) -> None:
    """Do nothing: the object's state has been restored in place."""


# ---- what is only compared


def mark_of(value: Any, num_items: int) -> int | None:
    """Return a number that changes with a value too large to be compared; None = not known.

    Args:
        value: An array, a tensor or a container.
        num_items: Items of a container that are visited anyway.
    """
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if type(value) is np.ndarray:
        is_small = value.flags.c_contiguous and value.nbytes <= _MOST_BYTES
        return zlib.crc32(value.tobytes()) if is_small else None  # of objects: their addresses
    if isinstance(value, _CONTAINERS) and num_items < len(value) <= _MOST_IDS:
        items = value.values() if isinstance(value, dict) else value
        return hash(tuple(map(id, items)))
    return None


def kept_by_code(path: str, value: Any) -> Iterator[Found]:
    """Yield what a function, a method or a partial function keeps between calls."""
    if isinstance(value, MethodType):
        yield Found(f"{path}.__self__", value.__self__, None)
    if isinstance(value, partial):
        yield Found(f"{path}.func", value.func, None)
        yield Found(f"{path}.args", value.args, None)
        yield Found(f"{path}.keywords", value.keywords, None)
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        for name, cell in zip(names, cells, strict=True):
            with suppress(ValueError):  # it is empty
                yield Found(f"{path}.{name}", cell.cell_contents, None)


_MOST_BYTES: Final = 1 << 24  # of an array, about 10 ms
_MOST_IDS: Final = 1 << 17  # of a container, about 10 ms
