"""Load checkpoints through torch.distributed.checkpoint, on any number of ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from modelzoo_trainer.checkpointing.load_save import load
from modelzoo_trainer.checkpointing.manifest import read_manifest
from modelzoo_trainer.checkpointing.shard_index import (
    LIST,
    SHARDS,
    Chunk,
    ShardedTensor,
    ShardIndex,
)
from modelzoo_trainer.checkpointing.sharded import (
    RequestedTensors,
    Use,
    Values,
    as_saved,
    dtype_of,
    flatten,
    narrowed,
    read_index,
    unflatten,
)
from modelzoo_trainer.errors import CheckpointError, CheckpointMismatch


class CheckpointReader(StorageReader):
    """Read a checkpoint of any layout for `torch.distributed.checkpoint.load`.

    Each rank verifies all files that it needs before any rank copies anything: if one of them
    finds damage, no state is changed anywhere. Nothing is unpickled.

    Args:
        path: The checkpoint.

    Cost: Each rank reads whole files, and holds what it needs in host memory until it is copied;
        of a checkpoint written by one process, the whole state.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._source: _ShardedSource | _WholeSource | None = None
        self._staged: dict[ReadItem, Any] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._source = None
        self._staged = {}

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    # Not called `kwargs`: by that name torch detects readers with metadata for each rank.
    @override
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        self._staged = {}
        try:
            manifest = read_manifest(self.path)
            is_sharded = SHARDS in manifest.files
            self._source = _ShardedSource(self.path) if is_sharded else _WholeSource(self.path)
            return _metadata_of(self._source.index)
        except CheckpointError as error:
            # torch would log it with a traceback and raise an AssertionError, so the next call
            # raises it.
            return Metadata({}, storage_data=error)

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata.storage_data, CheckpointError):
            raise metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self._stage(plan)  # here: if this fails anywhere, no rank starts to copy
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if any(item not in self._staged for item in plan.items):  # changed by another planner
            self._stage(plan)
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [(item, planner.resolve_tensor(item)) for item in tensors]
        for item, target in targets:
            _check_fits(item, self._staged[item], target)
        for item, target in targets:
            target.detach().copy_(self._staged.pop(item))
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                _hand_over(planner, item, self._staged.pop(item))
        self._staged = {}
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stage(self, plan: LoadPlan) -> None:
        if self._source is None:
            raise CheckpointError(
                "CheckpointReader has no metadata yet. Call read_metadata before "
                "prepare_local_plan."
            )
        self._staged = self._source.stage(plan.items)


class _ShardedSource:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = read_manifest(path)
        self.index = read_index(path, self._manifest)

    def stage(self, items: list[ReadItem]) -> dict[ReadItem, Any]:
        """Return the verified data of the items."""
        staged: dict[ReadItem, Any] = {}
        parts = RequestedTensors(self._path, self._manifest)
        names = {item.storage_index.fqn for item in items if item.type is LoadItemType.BYTE_IO}
        values = Values(parts, {name: self.index.values[name] for name in names})
        for item in items:
            if item.type is LoadItemType.TENSOR:
                tensor, chunk = self._find(item)
                use = _staging(staged, item, tensor, chunk)
                parts.want((chunk.file, chunk.name), use)
        parts.read()
        decoded = dict(values.decoded())
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                staged[item] = decoded[item.storage_index.fqn]
        return staged

    def _find(self, item: ReadItem) -> tuple[ShardedTensor, Chunk]:
        index = item.storage_index
        tensor = self.index.tensors[index.fqn]
        hint = index.index
        chunks = tensor.chunks if hint is None else tensor.chunks[hint : hint + 1] + tensor.chunks
        for chunk in chunks:
            if index.offset is None or chunk.offsets == tuple(index.offset):
                return tensor, chunk
        raise CheckpointError(
            f"The checkpoint has no shard of {index.fqn!r} at offset {index.offset}. It is "
            f"damaged; use another checkpoint."
        )


def _staging(
    staged: dict[ReadItem, Any], item: ReadItem, tensor: ShardedTensor, chunk: Chunk
) -> Use:
    def stage(stored: Tensor) -> None:
        staged[item] = _part(as_saved(stored, tensor, chunk), item)

    return stage


def _part(block: Tensor, item: ReadItem) -> Tensor:
    """Return the part of a block that an item needs, without keeping the block alive."""
    part = narrowed(block, item.storage_offsets, item.lengths)
    return part if part.numel() == block.numel() else part.clone()


class _WholeSource:
    """A checkpoint written by one process: each tensor is one block."""

    def __init__(self, path: Path) -> None:
        self._leaves, paths = flatten(load(path))
        tensors = {name: leaf for name, leaf in self._leaves.items() if isinstance(leaf, Tensor)}
        self.index = ShardIndex(
            world_size=1,
            tensors={name: _one_block(name, tensor) for name, tensor in tensors.items()},
            values={name: "" for name in self._leaves if name not in tensors},
            paths=paths,
        )

    def stage(self, items: list[ReadItem]) -> dict[ReadItem, Any]:
        """Return the data of the items; it was verified when it was loaded."""
        return {item: self._find(item) for item in items}

    def _find(self, item: ReadItem) -> Any:
        leaf = self._leaves[item.storage_index.fqn]
        if item.type is LoadItemType.BYTE_IO:
            return leaf
        return narrowed(leaf, item.storage_offsets, item.lengths)


def _one_block(name: str, tensor: Tensor) -> ShardedTensor:
    shape = tuple(tensor.shape)
    chunk = Chunk(offsets=(0,) * len(shape), lengths=shape, file="", name=name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ShardedTensor(dtype=dtype, shape=shape, chunks=(chunk,))


def _metadata_of(index: ShardIndex) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {}
    for name in index.paths:
        if name in index.tensors:
            entries[name] = _tensor_metadata(index.tensors[name])
        else:
            entries[name] = BytesStorageMetadata()
    paths = {
        name: tuple(key if kind == LIST else str(key) for kind, key in path)
        for name, path in index.paths.items()
    }
    return Metadata(entries, planner_data=paths, storage_data=index)


def _tensor_metadata(tensor: ShardedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(tensor)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.lengths))
            for chunk in tensor.chunks
        ],
    )


def _check_fits(item: ReadItem, saved: Tensor, target: Tensor) -> None:
    if saved.dtype is not target.dtype or saved.shape != target.shape:
        raise CheckpointMismatch(
            f"{item.dest_index.fqn} is {saved.dtype} of shape {list(saved.shape)} in the "
            f"checkpoint, but {target.dtype} of shape {list(target.shape)} in this run. Nothing "
            f"was changed. Use the original model and optimizer."
        )


def _hand_over(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    if isinstance(planner, CompleteLoadPlanner):
        planner.load_value(item, value)
        return
    # torch's planners accept a value only in the format of torch.save. It is created here, in
    # memory, from verified plain values: no byte of a file is ever unpickled.
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    planner.load_bytes(item, made)


_MAX_ROWS = 20


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Plan to load a whole checkpoint, into the tensors of a state where it has them.

    For a `CheckpointReader`. The result is `state()`.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._index: ShardIndex | None = None
        self._tensors: dict[str, Any] = {}

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        if isinstance(metadata.storage_data, CheckpointError):
            raise metadata.storage_data
        index: ShardIndex = metadata.storage_data
        leaves, _ = flatten(state_dict)
        given = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        _check_state(given, index)
        wanted: dict[str, Any] = {}
        for name in index.paths:
            if name in given:
                wanted[name] = given[name]
            elif name in index.tensors:
                tensor = index.tensors[name]
                wanted[name] = torch.empty(tensor.shape, dtype=dtype_of(tensor))
        super().set_up_planner(wanted, metadata, is_coordinator)
        self.state_dict = {**self.state_dict, **dict.fromkeys(index.values)}
        self._tensors = wanted
        self._index = index

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, strict=True)

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Store a value that is not a tensor."""
        self.state_dict[read_item.dest_index.fqn] = value

    def state(self) -> dict[str, Any]:
        """Return the loaded state, nested as it was saved."""
        assert self._index is not None
        return unflatten({**self.state_dict, **self._tensors}, self._index.paths)


def _check_state(given: Mapping[str, Tensor], index: ShardIndex) -> None:
    rows = []
    for name, tensor in given.items():
        saved = index.tensors.get(name)
        if saved is None:
            rows.append(f"{name}: not in the checkpoint")
        elif saved.shape != tuple(tensor.shape) or dtype_of(saved) is not tensor.dtype:
            here = str(tensor.dtype).removeprefix("torch.")
            rows.append(
                f"{name}: {saved.dtype} {list(saved.shape)} in the checkpoint, {here} "
                f"{list(tensor.shape)} in this run"
            )
    if rows:
        more = f"\n  and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
        raise CheckpointMismatch(
            "The checkpoint does not match the model:\n  " + "\n  ".join(rows[:_MAX_ROWS]) + more
        )
