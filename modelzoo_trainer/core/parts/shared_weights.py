"""Weights that several names of a model share; a file may have only one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def with_shared(own: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a state, and entries of tensors that share their memory with one of them.

    Args:
        own: The state of the model.
        entries: Values by name, of some or all of its tensors.
    """
    first: dict[tuple[int, Any], str] = {}
    for name in entries:
        if isinstance(own.get(name), Tensor):
            first.setdefault(_place_of(own[name]), name)
    others = {
        name: entries[first[_place_of(value)]]
        for name, value in own.items()
        if name not in entries and isinstance(value, Tensor) and _place_of(value) in first
    }
    return {**entries, **others}


def _place_of(tensor: Tensor) -> tuple[int, Any]:
    local: Any = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr() or id(tensor), (local.shape, local.dtype)
