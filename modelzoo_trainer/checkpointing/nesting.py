"""A nested state as one level of full names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from modelzoo_trainer.checkpointing.shard_index import DICT, LIST, TUPLE, Path
from modelzoo_trainer.errors import CheckpointError


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the leaves of a state by full name, and where each of them is.

    Leaves are tensors, everything that is no container, and lists and tuples without tensors and
    dicts in them: the names are those that torch.distributed.checkpoint gives.

    `state`: nested mappings, lists and tuples.

    Raises:
        CheckpointError: If two leaves have one name.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    try:
        _visit(state, (), leaves, paths)
    except RecursionError:
        raise CheckpointError("the state is nested too deeply, or contains itself.") from None
    return leaves, paths


def _visit(value: Any, path: Path, leaves: dict[str, Any], paths: dict[str, Path]) -> None:
    steps = _steps(value)
    if path and not steps:
        name = ".".join(str(key) for _, key in path)
        if name in leaves:
            raise CheckpointError(
                f"the state has two entries that are called {name!r}. Rename one of them."
            )
        leaves[name] = value
        paths[name] = path
    for kind, key in steps:
        _visit(value[key], (*path, (kind, key)), leaves, paths)


def _steps(value: Any) -> list[tuple[str, str | int]]:
    """Return the ways into a container that is taken apart."""
    if isinstance(value, Mapping):
        keys = list(value)
        is_plain = all(type(key) in (str, int) for key in keys)
        return [(DICT, key) for key in keys] if is_plain else []
    if isinstance(value, list | tuple) and _has_parts(value):
        kind = LIST if isinstance(value, list) else TUPLE
        return [(kind, idx) for idx in range(len(value))]
    return []


def _has_parts(value: Any) -> bool:
    """Return whether there are tensors or dicts in a list."""
    return any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list | tuple) and _has_parts(item))
        for item in value
    )


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the state that was taken apart; what `leaves` does not have is left out of dicts.

    Raises:
        CheckpointError: If they do not fit each other.
    """
    root = _Node(DICT)
    for name, path in paths.items():
        if name in leaves:
            _put(root, path, leaves[name])
    try:
        state: dict[str, Any] = root.built()
    except (LookupError, RecursionError):
        raise CheckpointError("the paths of the state's entries do not fit each other.") from None
    return state


class _Node:
    """A container that is being filled."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.items: dict[str | int, Any] = {}

    def built(self) -> Any:
        items = {
            key: item.built() if isinstance(item, _Node) else item
            for key, item in self.items.items()
        }
        if self.kind == DICT:
            return items
        values = [items[idx] for idx in range(len(items))]
        return values if self.kind == LIST else tuple(values)


def _put(root: _Node, path: Path, leaf: Any) -> None:
    node = root
    for (_, key), (kind, _) in pairwise(path):
        child = node.items.setdefault(key, _Node(kind))
        if not isinstance(child, _Node) or child.kind != kind:
            raise CheckpointError(f"the state's entry {path!r} lies in another entry.")
        node = child
    if path[-1][1] in node.items:
        raise CheckpointError(f"the state has two entries at {path!r}.")
    node.items[path[-1][1]] = leaf
