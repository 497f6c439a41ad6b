"""The index of a checkpoint written by several ranks: which file has which block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, TypeAlias

from modelzoo_trainer.errors import CheckpointError, reason_of

SHARDS: Final = "shards.json"
DICT: Final = "k"
LIST: Final = "l"
TUPLE: Final = "t"
StatePath: TypeAlias = tuple[tuple[str, str | int], ...]
"""Path of a leaf in the state: the kind of each container, and the key or index in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A block of a tensor, written by one rank."""

    offsets: tuple[int, ...]  # start in the whole tensor
    lengths: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor made of blocks."""

    dtype: str  # torch's name, such as "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Content of a checkpoint written by several ranks."""

    world_size: int
    tensors: Mapping[str, ShardedTensor]  # by full name
    values: Mapping[str, str]  # the file of each other value, by full name
    # the path of each of them in the state, in the order of the state
    paths: Mapping[str, StatePath] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the index as JSON."""
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "chunks": [
                    [chunk.offsets, chunk.lengths, chunk.file, chunk.name]
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in self.tensors.items()
        }
        raw = {
            "world_size": self.world_size,
            "tensors": tensors,
            "values": dict(self.values),
            "paths": [[name, path] for name, path in self.paths.items()],
        }
        return json.dumps(raw, separators=(",", ":")) + "\n"


def parse_index(raw: Any) -> ShardIndex:
    """Parse an index.

    Raises:
        CheckpointError: If it is invalid, or blocks do not fill their tensors.
    """
    try:
        tensors = {name: _tensor(name, value) for name, value in raw["tensors"].items()}
        paths = {name: _path(path) for name, path in raw["paths"]}
        values = {name: _text(file) for name, file in raw["values"].items()}
        world_size = _count(raw["world_size"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The index of the checkpoint ({SHARDS}) cannot be read: {reason_of(error)}. It is "
            f"damaged; use another checkpoint."
        ) from None
    if paths.keys() != tensors.keys() | values.keys() or tensors.keys() & values.keys():
        raise CheckpointError(
            f"The index of the checkpoint ({SHARDS}) is inconsistent: its paths do not match its "
            f"tensors and values. It is damaged; use another checkpoint."
        )
    return ShardIndex(world_size=world_size, tensors=tensors, values=values, paths=paths)


def _tensor(name: str, raw: Any) -> ShardedTensor:
    shape = _counts(raw["shape"])
    chunks = tuple(_chunk(chunk) for chunk in raw["chunks"])
    for chunk in chunks:
        begins_and_ends = zip(chunk.offsets, chunk.lengths, shape, strict=True)
        if any(offset + length > whole for offset, length, whole in begins_and_ends):
            raise ValueError(f"a shard of {name!r} is outside of the tensor's shape")
    found = sum(prod(chunk.lengths) for chunk in chunks)
    if found != prod(shape):
        raise ValueError(
            f"the shards of {name!r} have {found} values, but its shape has {prod(shape)}"
        )
    return ShardedTensor(dtype=_text(raw["dtype"]), shape=shape, chunks=chunks)


def _chunk(raw: Any) -> Chunk:
    offsets, lengths, file, name = raw
    return Chunk(
        offsets=_counts(offsets), lengths=_counts(lengths), file=_text(file), name=_text(name)
    )


def _path(raw: Any) -> StatePath:
    path = tuple((_text(kind), key) for kind, key in raw)
    for kind, key in path:
        fits = type(key) in (str, int) if kind == DICT else type(key) is int and key >= 0
        if kind not in (DICT, LIST, TUPLE) or not fits:
            raise ValueError(f"the path {path!r} has an invalid key {key!r} or kind {kind!r}")
    if not path or path[0][0] != DICT:
        raise ValueError(f"the path {path!r} does not start in a dict")
    return path


def _counts(raw: Any) -> tuple[int, ...]:
    return tuple(_count(item) for item in raw)


def _count(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw < 1 << 63:
        raise ValueError(f"{raw!r} is not an integer >= 0")
    return raw


def _text(raw: Any) -> str:
    if type(raw) is not str:
        raise TypeError(f"{raw!r} is not a string")
    return raw
