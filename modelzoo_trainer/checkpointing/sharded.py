"""Read a whole checkpoint written by several ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import checked_json, record_of_name
from modelzoo_trainer.checkpointing.manifest import SUFFIX, Manifest, check_listing
from modelzoo_trainer.checkpointing.shard_index import (
    DICT,
    LIST,
    SHARDS,
    TUPLE,
    Chunk,
    ShardedTensor,
    ShardIndex,
    StatePath,
    parse_index,
)
from modelzoo_trainer.checkpointing.state_json import Tensors, decode
from modelzoo_trainer.checkpointing.stores.reading import complete
from modelzoo_trainer.checkpointing.tensor_file import checked_tensors
from modelzoo_trainer.errors import CheckpointError, reason_of

Place: TypeAlias = tuple[str, str]
"""A tensor in a file: the file, the name in it."""
Use: TypeAlias = Callable[[Tensor], None]


def read_index(path: Path, manifest: Manifest) -> ShardIndex:
    """Return the index of a checkpoint after checking the names and sizes of its files.

    Raises:
        CheckpointError: If these do not match, or the index is damaged.
    """
    check_listing(path, manifest)
    return parse_index(checked_json(path / SHARDS, record_of_name(manifest.files, SHARDS)))


def load_sharded(
    path: Path, manifest: Manifest, *, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """Verify a checkpoint written by several ranks and return its state, with whole tensors.

    `keys`: keys of the state to load and verify; None = all, which verifies every file.

    Raises:
        CheckpointError: If it is damaged.

    Cost: Reads each file once; host memory for the whole state, and one block of a tensor.
    """
    index = read_index(path, manifest)
    names = [name for name, steps in index.paths.items() if keys is None or steps[0][1] in keys]
    parts = RequestedTensors(path, manifest)
    leaves: dict[str, Any] = {}
    tied = _tied(index, names)
    for name in names:
        if name in index.tensors and name not in tied:
            _want_whole(parts, name, index.tensors[name], leaves)
    values = Values(parts, {name: index.values[name] for name in names if name in index.values})
    parts.read(everything=keys is None)
    leaves |= {name: leaves[first] for name, first in tied.items()}
    leaves.update(values.decoded())
    return unflatten(leaves, index.paths)


def _tied(index: ShardIndex, names: Iterable[str]) -> dict[str, str]:
    """Return tensors with the same blocks as an earlier one, and the name of the earlier one.

    Every rank stores the block of tied tensors once.
    """
    first: dict[Any, str] = {}
    tied = {}
    for name in names:
        tensor = index.tensors.get(name)
        if tensor is None:
            continue
        blocks = frozenset(chunk for chunk in tensor.chunks if prod(chunk.lengths))
        if blocks:
            kept = first.setdefault((tensor.dtype, tensor.shape, blocks), name)
            if kept != name:
                tied[name] = kept
    return tied


class RequestedTensors:
    """Read requested tensors of the tensor files, each file once."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._uses: dict[str, dict[str, list[Use]]] = {}

    def want(self, place: Place, use: Use) -> None:
        """Call `use` with a tensor as stored in its file."""
        file, name = place
        record_of_name(self.manifest.files, file)
        if not file.endswith(SUFFIX):
            raise CheckpointError(
                f"The checkpoint is damaged: {SHARDS!r} refers to {file!r} as a file of tensors. "
                f"Use another checkpoint."
            )
        self._uses.setdefault(file, {}).setdefault(name, []).append(use)

    def json(self, file: str) -> Any:
        """Return the verified content of a JSON file."""
        return checked_json(self.path / file, record_of_name(self.manifest.files, file))

    def read(self, *, everything: bool = False) -> None:
        """Read and verify all requested tensors.

        `everything`: also verify tensor files without requested tensors.

        Raises:
            CheckpointError: If a file is damaged or lacks a requested tensor.
        """
        files = {name for name in self.manifest.files if name.endswith(SUFFIX)}
        wanted = sorted(files if everything else files & self._uses.keys())
        complete(self.path, {file: self.manifest.files[file] for file in wanted})
        for file in wanted:
            uses = self._uses.get(file, {})
            record = self.manifest.files[file]
            found = set()
            for _, name, tensor in checked_tensors(self.path / file, record, uses.__contains__):
                found.add(name)
                for use in uses[name]:
                    use(tensor)
            missing = sorted(uses.keys() - found)
            if missing:
                raise CheckpointError(
                    f"{str(self.path / file)!r} lacks the tensor {missing[0]!r}. The checkpoint is "
                    f"damaged; use another checkpoint."
                )


class Values:
    """Values other than tensors, and the arrays in them.

    `parts`: reads the arrays; call its `read` before `decoded`.
    """

    def __init__(self, parts: RequestedTensors, files: Mapping[str, str]) -> None:
        self._raw: dict[str, Any] = {}
        self._tensors: dict[str, Tensors] = {}
        loaded = {file: parts.json(file) for file in sorted(set(files.values()))}
        try:
            for name, file in files.items():
                entry = loaded[file][name]
                self._raw[name] = entry["value"]
                for stem, inner, place in entry["tensors"]:
                    keep = self._tensors.setdefault(name, {}).setdefault(str(stem), {})
                    parts.want((str(place[0]), str(place[1])), _keeping(keep, str(inner)))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The values of checkpoint {str(parts.path)!r} cannot be read: {reason_of(error)}. "
                f"It is damaged; use another checkpoint."
            ) from None

    def decoded(self) -> Iterator[tuple[str, Any]]:
        """Yield each value, by full name."""
        for name, raw in self._raw.items():
            yield name, decode({name: raw}, self._tensors.get(name, {}))[name]


def _keeping(kept: dict[str, Tensor], name: str) -> Use:
    def keep(tensor: Tensor) -> None:
        kept[name] = tensor

    return keep


def _want_whole(
    parts: RequestedTensors, name: str, tensor: ShardedTensor, leaves: dict[str, Any]
) -> None:
    """Request a tensor's blocks and assemble them; use a single block as it is."""
    is_single = len(tensor.chunks) == 1 and tensor.chunks[0].lengths == tensor.shape
    whole = None if is_single else torch.empty(tensor.shape, dtype=dtype_of(tensor))
    if whole is not None:
        leaves[name] = whole
    for chunk in tensor.chunks:
        parts.want((chunk.file, chunk.name), _placing(name, tensor, chunk, leaves))


def _placing(name: str, tensor: ShardedTensor, chunk: Chunk, leaves: dict[str, Any]) -> Use:
    def place(stored: Tensor) -> None:
        block = as_saved(stored, tensor, chunk)
        if name in leaves:
            narrowed(leaves[name], chunk.offsets, chunk.lengths).copy_(block)
        else:
            leaves[name] = block

    return place


def narrowed(tensor: Tensor, offsets: Collection[int], lengths: Collection[int]) -> Tensor:
    """Return the block of a tensor that starts at `offsets`."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def dtype_of(tensor: ShardedTensor) -> torch.dtype:
    """Return the dtype in the index."""
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{SHARDS!r} has the dtype {tensor.dtype!r}, which PyTorch {torch.__version__} does "
            f"not have. Load the checkpoint with the version of PyTorch that saved it."
        )
    return dtype


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor as stored in a file: complex numbers as pairs of real ones."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def as_saved(stored: Tensor, tensor: ShardedTensor, chunk: Chunk) -> Tensor:
    """Invert `as_stored` for a block.

    Raises:
        CheckpointError: If dtype or shape in the file differ from the index.
    """
    dtype = dtype_of(tensor)
    block = stored
    if dtype.is_complex and stored.shape[-1:] == (2,) and stored.dtype is dtype.to_real():
        block = torch.view_as_complex(stored)
    if block.dtype is not dtype or tuple(block.shape) != chunk.lengths:
        raise CheckpointError(
            f"{chunk.file!r} has {chunk.name!r} as {block.dtype} of shape {tuple(block.shape)}, "
            f"but {SHARDS!r} lists {dtype} of shape {chunk.lengths}. The checkpoint is damaged; "
            f"use another checkpoint."
        )
    return block


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, StatePath]]:
    """Return the leaves of a state by full name, and the path of each.

    Leaves are tensors, values that are not containers, and lists and tuples without tensors and
    dicts in them; names are as in torch.distributed.checkpoint.

    `state`: nested mappings, lists and tuples.

    Raises:
        CheckpointError: If two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    try:
        _visit(state, (), leaves, paths)
    except RecursionError:
        raise CheckpointError(
            "state_dict: the state is nested too deeply, or contains itself. Return a plain dict "
            "of tensors, numbers, strings and lists."
        ) from None
    return leaves, paths


def _visit(
    value: Any, path: StatePath, leaves: dict[str, Any], paths: dict[str, StatePath]
) -> None:
    steps = _steps(value)
    if path and not steps:
        name = ".".join(str(key) for _, key in path)
        if name in leaves:
            raise CheckpointError(
                f"state_dict: two entries have the name {name!r} (their keys, joined by dots). "
                f"Rename one of them."
            )
        leaves[name] = value
        paths[name] = path
    for kind, key in steps:
        _visit(value[key], (*path, (kind, key)), leaves, paths)


def _steps(value: Any) -> list[tuple[str, str | int]]:
    """Return the steps into a container that is flattened."""
    if isinstance(value, Mapping):
        keys = list(value)
        is_plain = all(type(key) in (str, int) for key in keys)
        return [(DICT, key) for key in keys] if is_plain else []
    if isinstance(value, list | tuple) and _has_parts(value):
        kind = LIST if isinstance(value, list) else TUPLE
        return [(kind, idx) for idx in range(len(value))]
    return []


def _has_parts(value: Any) -> bool:
    """Return whether a list contains tensors or dicts."""
    return any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list | tuple) and _has_parts(item))
        for item in value
    )


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, StatePath]) -> dict[str, Any]:
    """Rebuild a flattened state; entries missing from `leaves` are omitted from dicts.

    Raises:
        CheckpointError: If leaves and paths do not match.
    """
    root = _Node(DICT)
    for name, path in paths.items():
        if name in leaves:
            _put(root, path, leaves[name])
    try:
        state: dict[str, Any] = root.built()
    except (LookupError, RecursionError):
        raise CheckpointError(
            f"The index of the checkpoint ({SHARDS}) is inconsistent: a list has no item at some "
            f"index, or entries are nested too deeply. It is damaged; use another checkpoint."
        ) from None
    return state


class _Node:
    """A container being filled."""

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


def _put(root: _Node, path: StatePath, leaf: Any) -> None:
    node = root
    for (_, key), (kind, _) in pairwise(path):
        child = node.items.setdefault(key, _Node(kind))
        if not isinstance(child, _Node) or child.kind != kind:
            raise _inconsistent(path, "inside another entry")
        node = child
    if path[-1][1] in node.items:
        raise _inconsistent(path, "listed twice")
    node.items[path[-1][1]] = leaf


def _inconsistent(path: StatePath, what: str) -> CheckpointError:
    name = ".".join(str(key) for _, key in path)
    return CheckpointError(
        f"The index of the checkpoint ({SHARDS}) is inconsistent: the entry {name!r} is {what}. It "
        f"is damaged; use another checkpoint."
    )
