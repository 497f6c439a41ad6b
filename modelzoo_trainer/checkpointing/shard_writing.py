"""Write one rank's share of a checkpoint, and combine all shares on the main process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from typing_extensions import override

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.manifest import SUFFIX, FileRecord
from modelzoo_trainer.checkpointing.shard_index import (
    DICT,
    LIST,
    Chunk,
    ShardedTensor,
    ShardIndex,
    StatePath,
)
from modelzoo_trainer.checkpointing.sharded import as_stored, flatten
from modelzoo_trainer.checkpointing.state_json import StateEncoder
from modelzoo_trainer.checkpointing.stores.apart import folder_for_upload, upload
from modelzoo_trainer.checkpointing.tensor_file import METADATA, bytes_of, can_hold
from modelzoo_trainer.checkpointing.transaction import WriteFile
from modelzoo_trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Where a rank writes."""

    folder: str
    rank: int  # among the writing ranks
    attempt: str = ""  # of those that do not see the folder, to upload their files


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEntry:
    """A rank's report on one entry that it wrote."""

    file: str
    name: str
    records: Mapping[str, FileRecord]  # all files of the rank
    is_uploaded: bool = False  # to an object store, instead of written to the folder


class _Content:
    """Content of a rank's files.

    `is_sharded`: whether the rank has blocks of sharded tensors. Whole tensors, which every rank
    needs, have a file of their own then, so that a rank reads no blocks of others.
    """

    def __init__(self, rank: int, *, is_sharded: bool) -> None:
        self._block_file = f"shard-{rank:05d}{SUFFIX}"
        self._whole_file = f"whole-{rank:05d}{SUFFIX}" if is_sharded else self._block_file
        self.value_file = f"values-{rank:05d}.json"
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.values: dict[str, Any] = {}
        self.places: list[tuple[WriteItem, str, str]] = []
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {}

    def add_tensor(self, item: WriteItem, tensor: Tensor) -> None:
        data = item.tensor_data
        stored = as_stored(tensor)
        if data is None or not can_hold(stored):
            raise CheckpointError(
                f"{item.index.fqn} cannot be saved: it is a tensor of {tensor.dtype} and "
                f"{tensor.layout} on {tensor.device.type}. Convert it in state_dict to a dense "
                f"tensor, with to_dense(), or to a dtype that safetensors supports."
            )
        if tensor.dtype is not data.properties.dtype or tensor.shape != data.chunk.sizes:
            raise CheckpointError(
                f"The planner returned {item.index.fqn} as {tensor.dtype} of shape "
                f"{list(tensor.shape)}, but planned it as {data.properties.dtype} of shape "
                f"{list(data.chunk.sizes)}."
            )
        name, file = item.index.fqn, self._whole_file
        if _is_block(item):
            name += "@" + ",".join(map(str, data.chunk.offsets))
            file = self._block_file
        self.places.append((item, *self._put(file, name, stored)))

    def add_value(self, item: WriteItem, value: Any) -> None:
        name = item.index.fqn
        _refuse_distributed(name, value)
        encoded = StateEncoder({name: value})
        tensors = [
            [stem, inner, [*self._put(self._whole_file, f"{name}:{inner}", tensor)]]
            for stem, found in encoded.tensors.items()
            for inner, tensor in found.items()
        ]
        self.values[name] = {"value": encoded.state_json[name], "tensors": tensors}
        self.places.append((item, self.value_file, name))

    def _put(self, file: str, name: str, tensor: Tensor) -> tuple[str, str]:
        """Return the file of a tensor and its name there; tied tensors share the first one's."""
        key = _memory_of(tensor)
        if tensor.numel() and key in self._known:
            return self._known[key]
        tensors = self.tensors.setdefault(file, {})
        while name in tensors or name == METADATA:
            name += "_"
        tensors[name] = tensor
        self._known[key] = file, name
        return file, name


def _is_block(item: WriteItem) -> bool:
    """Return whether a tensor to write is a block of a larger one."""
    data = item.tensor_data
    return data is not None and data.chunk.sizes != data.size


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for tied tensors."""
    place = (tensor.data_ptr(), tensor.device, tensor.dtype)
    return (*place, tuple(tensor.shape), tuple(tensor.stride()))


def _refuse_distributed(name: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, DTensor):
            raise CheckpointError(
                f"{name} has a DTensor inside a tuple, which cannot be saved as shards. Use a list "
                f"instead of the tuple, or pass planner=CheckpointSavePlanner()."
            )
        if isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()


def write_share(
    share: Share, items: Sequence[WriteItem], planner: SavePlanner, by: WriteFile = write_file
) -> list[WriteResult]:
    """Write this rank's part of the plan durably; `by`: what writes a file.

    Values are encoded first, so that a value that cannot be saved raises early.

    Raises:
        CheckpointError: If a value cannot be saved.
        OSError: If writing fails.
    """
    content = _Content(share.rank, is_sharded=any(map(_is_block, items)))
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            content.add_value(item, _value_of(planner, item))
    for item in items:
        if item.type is not WriteItemType.BYTE_IO:
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"resolve_data of the planner returned a {type(tensor).__name__} for "
                    f"{item.index.fqn}; it must return a tensor."
                )
            content.add_tensor(item, tensor)
    records = _write(Path(share.folder), content, by)
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=item.tensor_storage_size() or 0,
            storage_data=WrittenEntry(file=file, name=name, records=records),
        )
        for item, file, name in content.places
    ]


def upload_share(
    share: Share,
    path: Path,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    by: WriteFile = write_file,
) -> list[WriteResult]:
    """Write this rank's part to a folder of its host, upload it, and remove it there.

    `path`: the checkpoint, in the local copy of this host.

    Raises:
        CheckpointError: If a value cannot be saved, or no object store can take it.
        OSError: If writing or uploading fails.
    """
    with folder_for_upload(path) as folder:
        results = write_share(replace(share, folder=str(folder)), items, planner, by)
        upload(path, share.attempt, folder, records_of([results]))
    return [
        replace(result, storage_data=replace(result.storage_data, is_uploaded=True))
        for result in results
    ]


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:  # its resolve_data would pickle
        raise CheckpointError(
            f"{item.index.fqn} is not a tensor, and the planner {type(planner).__name__} could "
            f"only pickle it. Pass a DefaultSavePlanner or a CheckpointSavePlanner."
        )
    return look_up(item.index)


def _write(folder: Path, content: _Content, by: WriteFile) -> dict[str, FileRecord]:
    records = {}
    for file, tensors in content.tensors.items():
        records[file] = by(folder / file, bytes_of(tensors))
    if content.values:
        text = json.dumps(content.values, allow_nan=False).encode("ascii")
        records[content.value_file] = by(folder / content.value_file, [text])
    return records


def abandon(folder: Path) -> None:
    """Rename a directory that is being written, and remove it.

    After the rename, other processes fail to open files in it, so all of it can be removed.
    """
    with suppress(OSError):
        trash = folder.with_name(hidden_name("trash", "draft"))
        disk.rename(folder, trash)
        disk.remove_tree(trash)


def records_of(results: Iterable[Iterable[WriteResult]]) -> dict[str, FileRecord]:
    """Return all files that the ranks wrote."""
    records: dict[str, FileRecord] = {}
    for result in _all(results):
        records.update(result.storage_data.records)
    return records


def uploaded_of(results: Iterable[Iterable[WriteResult]]) -> set[str]:
    """Return the files that are only in an object store."""
    written = [result.storage_data for result in _all(results)]
    return {file for one in written if one.is_uploaded for file in one.records}


def index_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], world_size: int
) -> ShardIndex:
    """Return the index of what the ranks wrote.

    Raises:
        CheckpointError: If a planned entry was not written.
    """
    written = {(result.index.fqn, result.index.offset): result for result in _all(results)}
    tensors, values = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = _tensor_of(name, entry, written)
        else:
            values[name] = _place(name, None, written).file
    planned: Mapping[str, Any] = metadata.planner_data or {}
    order = [name for name in planned if name in tensors or name in values]
    order += [name for name in (*tensors, *values) if name not in planned]
    paths = {name: _path_of(planned.get(name, (name,))) for name in order}
    return ShardIndex(world_size=world_size, tensors=tensors, values=values, paths=paths)


def _all(results: Iterable[Iterable[WriteResult]]) -> list[WriteResult]:
    return [result for of_one in results for result in of_one]


_Results = Mapping[tuple[str, Any], WriteResult]


def _tensor_of(name: str, entry: TensorStorageMetadata, written: _Results) -> ShardedTensor:
    chunks = []
    for chunk in entry.chunks:
        place = _place(name, chunk.offsets, written)
        chunks.append(
            Chunk(
                offsets=tuple(chunk.offsets),
                lengths=tuple(chunk.sizes),
                file=place.file,
                name=place.name,
            )
        )
    return ShardedTensor(
        dtype=str(entry.properties.dtype).removeprefix("torch."),
        shape=tuple(entry.size),
        chunks=tuple(chunks),
    )


def _place(name: str, offsets: Any, written: _Results) -> WrittenEntry:
    result = written.get((name, offsets))
    if result is None:
        where = "" if offsets is None else f" at offset {list(offsets)}"
        raise CheckpointError(
            f"No process has written {name}{where}, although the save plan contains it."
        )
    place: WrittenEntry = result.storage_data
    return place


def _path_of(planned: Sequence[Any]) -> StatePath:
    """Complete a path with the kinds of its containers, some of which torch's planner omits."""
    return tuple(
        step if isinstance(step, tuple) else (LIST if isinstance(step, int) else DICT, step)
        for step in planned
    )


class CheckpointSavePlanner(DefaultSavePlanner):
    """The default plan, but containers are restored unchanged and tied tensors stored once.

    The default plan turns integer keys of dicts into strings and loses empty dicts. Of tensors that
    several ranks have, it may let different ranks write tied ones.
    """

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        leaves, paths = flatten(state_dict)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
        self.flatten_state_dict = False
        super().set_up_planner(tensors, storage_meta, is_coordinator)
        self.flatten_state_dict = True  # from now on `mappings` are part of the plan
        done: dict[str, Any] = self.state_dict  # flat now
        self.state_dict = {
            name: done.get(name, leaf)
            for name, leaf in leaves.items()
            if name in done or name not in tensors
        }
        self.mappings = dict(paths)  # type: ignore[arg-type]  # the coordinator only merges them

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(_with_ties(all_plans, _tied_to(self.state_dict)))


def _tied_to(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tied tensors, each with the first of those that it is tied to."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        own = value.to_local().detach() if isinstance(value, DTensor) else value
        if type(own) in (Tensor, Parameter) and own.layout is torch.strided and own.numel():
            kept = first.setdefault((*_memory_of(own), tuple(value.shape)), name)
            if kept != name:
                tied |= {name: kept, kept: kept}
    return tied


def _with_ties(plans: list[SavePlan], tied: Mapping[str, str]) -> list[SavePlan]:
    """Return plans in which one rank writes all tensors that are tied to each other."""
    if not tied:
        return plans
    writers: dict[tuple[str, Any], int] = {}
    planned = set()
    for number, plan in enumerate(plans):
        for index in (item.index for item in plan.items if item.index.fqn in tied):
            writers.setdefault((tied[index.fqn], index.offset), number)
            planned.add((number, index))

    def is_kept(number: int, item: WriteItem) -> bool:
        name = tied.get(item.index.fqn)
        if name is None:
            return True
        writer = writers[name, item.index.offset]
        return number == writer or (writer, item.index) not in planned

    return [
        replace(plan, items=[item for item in plan.items if is_kept(number, item)])
        for number, plan in enumerate(plans)
    ]
