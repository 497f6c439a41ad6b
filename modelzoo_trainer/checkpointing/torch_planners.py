"""Plans for torch.distributed.checkpoint that keep the types of a state's containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from typing_extensions import override

from modelzoo_trainer.checkpointing.nesting import flatten, unflatten
from modelzoo_trainer.checkpointing.shard_index import ShardIndex
from modelzoo_trainer.checkpointing.sharded import dtype_of
from modelzoo_trainer.errors import CheckpointError, CheckpointMismatch

_MAX_ROWS = 20


class CheckpointSavePlanner(DefaultSavePlanner):
    """The default plan, with containers that come back as they were.

    The default one makes strings of the integer keys of dicts and loses empty dicts.
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
        self.flatten_state_dict = True  # from here on: `mappings` are part of the plan
        done: dict[str, Any] = self.state_dict  # nested shards are one level now
        self.state_dict = {
            name: done.get(name, leaf)
            for name, leaf in leaves.items()
            if name in done or name not in tensors
        }
        self.mappings = dict(paths)  # type: ignore[arg-type]  # the coordinator only merges them


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Plans to load all of a checkpoint, into the tensors of a state where it has them.

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
        _check_fits(given, index)
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
        """Take a value that is no tensor."""
        self.state_dict[read_item.dest_index.fqn] = value

    def state(self) -> dict[str, Any]:
        """Return what was loaded, nested as it was saved."""
        assert self._index is not None
        return unflatten({**self.state_dict, **self._tensors}, self._index.paths)


def _check_fits(given: Mapping[str, Tensor], index: ShardIndex) -> None:
    rows = []
    for name, tensor in given.items():
        saved = index.tensors.get(name)
        if saved is None:
            rows.append(f"{name}: not in the checkpoint")
        elif saved.shape != tuple(tensor.shape) or dtype_of(saved) is not tensor.dtype:
            here = str(tensor.dtype).removeprefix("torch.")
            rows.append(
                f"{name}: {saved.dtype} {list(saved.shape)} in the checkpoint, {here} "
                f"{list(tensor.shape)} here"
            )
    if rows:
        more = f"\n  and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
        raise CheckpointMismatch(
            "the checkpoint does not fit:\n  " + "\n  ".join(rows[:_MAX_ROWS]) + more
        )
