"""Walks over nested tuples, lists and mappings of tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(
    tree: Any, function: Callable[[Tensor], Any], movable: Callable[[Any], Any] | None = None
) -> Any:
    """Return the structure with `function` applied to each tensor.

    Tuples (named ones too), lists and mappings keep their kind; everything else is passed on as
    it is.

    Args:
        tree: The structure.
        function: What to do with a tensor.
        movable: What to do with another object that has a method `to` (a packed sequence, a
            graph): it knows which of its tensors stay on the host. None = pass it on.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, function, movable) for key, value in tree.items()}
        return mapped if type(tree) is dict else _like_mapping(tree, mapped)
    if hasattr(tree, "to"):
        return tree if movable is None else movable(tree)
    if isinstance(tree, tuple):
        parts = [map_tensors(value, function, movable) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_tensors(value, function, movable) for value in tree]
    return tree


def _like_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    copy = getattr(tree, "copy", None)
    if copy is None:
        return mapped
    changed = copy()
    if not hasattr(changed, "update"):
        return mapped
    changed.update(mapped)
    return changed
