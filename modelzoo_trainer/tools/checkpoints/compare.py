"""Differences between two states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

_MAX_TEXT: Final = 60
_PIECE: Final = 1 << 20  # elements compared at a time in double precision
_Path: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry that differs."""

    name: str  # full name
    kind: str  # "added", "removed" or "changed"
    what: str


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between two states, by name; empty if all bits are equal.

    `before`: nested mappings, lists and tuples, as returned by `load`.
    """
    left, right = dict(_leaves(before)), dict(_leaves(after))
    found = []
    for path in left.keys() | right.keys():
        if path not in right:
            found.append(Difference(_name(path), "removed", _described(left[path])))
        elif path not in left:
            found.append(Difference(_name(path), "added", _described(right[path])))
        else:
            change = _change(left[path], right[path])
            if change is not None:
                found.append(Difference(_name(path), "changed", change))
    return sorted(found, key=lambda difference: (difference.name, difference.kind))


def _leaves(state: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield leaves and empty containers."""
    parts: list[tuple[tuple[str, Any], Any]] = []
    if isinstance(state, Mapping):
        parts = [((".", key), item) for key, item in state.items()]
    elif isinstance(state, list | tuple):
        kind = "[" if isinstance(state, list) else "("
        parts = [((kind, idx), item) for idx, item in enumerate(state)]
    if not parts:
        yield path, state
    for step, item in parts:
        yield from _leaves(item, (*path, step))


def _name(path: _Path) -> str:
    return "".join(f".{key}" if kind == "." else f"[{key}]" for kind, key in path).removeprefix(".")


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _change(before: Any, after: Any) -> str | None:
    """Describe a change; None if nothing changed."""
    if type(before) is not type(after):
        return f"{_described(before)} -> {_described(after)}"
    if isinstance(before, np.ndarray):
        if before.dtype == after.dtype:
            return _tensor_change(torch.from_numpy(before), torch.from_numpy(after))
        return f"{_described(before)} -> {_described(after)}"
    if isinstance(before, Tensor):
        return _tensor_change(before, after)
    is_same = _bits(before) == _bits(after)
    return None if is_same else f"{_described(before)} -> {_described(after)}"


def _bits(value: Any) -> Any:
    """Return a value that is equal for equal bits: nan equals itself, 0.0 does not equal -0.0."""
    if isinstance(value, float):
        return value.hex()
    return value.tobytes() if isinstance(value, np.generic) else value


def _tensor_change(before: Tensor, after: Tensor) -> str | None:
    if before.dtype is not after.dtype or before.shape != after.shape:
        return f"{_described(before)} -> {_described(after)}"
    num, largest = 0, 0.0
    flat, other = before.reshape(-1), after.reshape(-1)
    for begin in range(0, len(flat), _PIECE):
        left, right = flat[begin : begin + _PIECE], other[begin : begin + _PIECE]
        num_here = int((_as_bytes(left) != _as_bytes(right)).any(dim=-1).sum())
        if num_here:
            num += num_here
            largest = max(largest, _max_difference(left, right))
    if not num:
        return None
    text = f"{num} of {before.numel()} values of {_described(before)}"
    return text if before.dtype is torch.bool else f"{text}, by up to {largest:.6g}"


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.itemsize)


def _max_difference(before: Tensor, after: Tensor) -> float:
    """Return the largest absolute difference, rounded for 64-bit integers.

    Equal infinities do not differ; a nan in only one of them is an infinite difference.
    """
    exact = torch.complex128 if before.dtype.is_complex else torch.float64
    left, right = before.to(exact), after.to(exact)
    is_same = (left == right) | (left.isnan() & right.isnan())
    differences = (left - right).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(differences.masked_fill(is_same, 0.0).max())
