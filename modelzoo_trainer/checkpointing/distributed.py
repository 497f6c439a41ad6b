"""Checkpoints that several processes write together, through torch.distributed.checkpoint.

It plans who writes what, and copies the state for asynchronous saves; what is on the disk is ours:

    shard-00000.safetensors  the tensors, and blocks of tensors, of the first process
    values-00000.json        its values that are no tensors
    shards.json              which file has which block of what
    manifest.json            written last; then the directory gets its name
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_planned
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from modelzoo_trainer.checkpointing.distributed_reader import CheckpointReader, CompleteLoadPlanner
from modelzoo_trainer.checkpointing.shard_index import SHARDS, ShardIndex
from modelzoo_trainer.checkpointing.shard_writing import (
    CheckpointSavePlanner,
    Share,
    abandon,
    index_of,
    records_of,
    write_share,
)
from modelzoo_trainer.checkpointing.sharded import dtype_of, flatten, unflatten
from modelzoo_trainer.checkpointing.transaction import CheckpointTransaction
from modelzoo_trainer.errors import CheckpointError, DiskError, is_refusal_of_disk


class CheckpointWriter(StorageWriter):
    """Writes a checkpoint for `torch.distributed.checkpoint.save` and `async_save`.

    Every process writes one file of tensors; the main process commits them all with one rename. If
    any process fails, nothing is committed and nothing is left behind. What is no tensor is
    written as JSON; nothing is pickled. What each process has of its own, such as random
    generators, needs a key of its own: of equal keys, one process's value is kept.
    With torch's own planner, dicts with integer keys come back with strings for them and empty
    dicts are lost, as in torch's own format; `CheckpointSavePlanner` keeps both.

    Args:
        path: A name that is not in use, in a folder that all processes see.
        step: The global step, for the manifest.
        facts: What else the manifest is to say.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.step = step
        self.facts = facts
        self._transaction: CheckpointTransaction | None = None
        self._world_size = 1

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._transaction = None

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return not os.path.lexists(checkpoint_id)

    @override
    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path)

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "a checkpoint needs use_collectives=True: its processes commit it together."
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise CheckpointError(
                "the planner has enable_plan_caching=True, with which a process would write into "
                "the directory of an earlier checkpoint. Leave it off."
            )
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        try:
            self._transaction = CheckpointTransaction(self.path)
        except CheckpointError as error:
            if is_refusal_of_disk(error):
                raise DiskError(str(error)) from error.__cause__
            raise
        self._world_size = len(plans)
        return [
            replace(plan, storage_data=Share(folder=str(self._transaction.folder), rank=rank))
            for rank, plan in enumerate(plans)
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: Share = plan.storage_data
        try:
            results = write_share(share, plan.items, planner)
        except BaseException as error:
            if isinstance(error, FileNotFoundError) and not Path(share.folder).exists():
                raise _AbandonedError(f"{share.folder!r}: another process gave it up.") from error
            abandon(Path(share.folder))
            if not isinstance(error, OSError):
                raise
            raise DiskError(f"{error.strerror or error}. Earlier ones are untouched.") from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def discard(self) -> None:
        """Remove what is being written, in the process that would commit it; else do nothing.

        For a save that ended in another error than that of one of its steps, such as a lost
        connection: torch does not pass those to its writer.
        """
        if self._transaction is not None:
            abandon(self._transaction.folder)
            self._transaction = None

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        transaction = self._transaction
        assert transaction is not None
        try:
            index = index_of(metadata, results, self._world_size)
            transaction.records.update(records_of(results))
            transaction.write(SHARDS, [index.to_json().encode("ascii")])
            transaction.commit(step=self.step, facts=self.facts)
        except BaseException as error:
            transaction.discard()
            if is_refusal_of_disk(error):
                raise DiskError(str(error)) from error.__cause__  # others get it without the cause
            raise
        self._transaction = None


def save_sharded(
    path: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    facts: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Write a checkpoint together with the other processes; all of them call this.

    Args:
        path: A name that is not in use, in a folder that all processes see.
        state: As for `save`; also with DTensors and ShardedTensors. Under one key all processes
            have the same, or their part of it.
        step: The global step, for the manifest.
        facts: What else the manifest is to say.
        process_group: Who takes part, over a backend that moves host memory; None = all.

    Raises:
        CheckpointError: In every process, if any of them fails. Nothing is left behind then.
        Exception: What the process group raises if a process is lost. Likewise.

    Cost: Collective. One process: no process group is needed.
    """
    writer = CheckpointWriter(path, step=step, facts=facts)
    try:
        with _plain_errors(f"checkpoint {str(path)!r} could not be written"):
            save_planned(
                dict(state),
                storage_writer=writer,
                planner=CheckpointSavePlanner(),
                process_group=process_group,
            )
    except BaseException:
        writer.discard()  # also if it was the connection to another process that failed
        raise


def load_into(
    path: Path, state: Mapping[str, Any], *, process_group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Load a checkpoint on any number of processes; all of them call this.

    Args:
        path: The checkpoint, whoever wrote it.
        state: Its tensors (also DTensors) are filled in place where the checkpoint has the same
            names; may be empty.
        process_group: Who takes part, over a backend that moves host memory; None = all.

    Returns:
        All of the checkpoint's state: the tensors of `state` where it has them, else whole ones in
        host memory.

    Raises:
        CheckpointMismatch: If a tensor of `state` is not in it, or with another shape or dtype.
        CheckpointError: In every process, if it is not intact for any of them. Nothing was
            changed then.

    Cost: Collective. One process: no process group is needed.
    """
    planner = CompleteLoadPlanner()
    with _plain_errors(f"checkpoint {str(path)!r} could not be loaded"):
        load_planned(
            dict(state),
            storage_reader=CheckpointReader(path),
            planner=planner,
            process_group=process_group,
        )
    return planner.state()


def load_like(
    path: Path, like: Mapping[str, Any], *, process_group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Load a checkpoint on any number of processes into new tensors; all of them call this.

    Args:
        path: The checkpoint, whoever wrote it.
        like: Tensors by the names of the checkpoint, or by the beginnings of names. What fits one
            in its shape is divided among the processes as that is; it is not changed.
        process_group: Who takes part, over a backend that moves host memory; None = all.

    Returns:
        All of the checkpoint's state; what fits nothing in `like` whole, in host memory.

    Raises:
        CheckpointError: In every process, if it is not intact for any of them.

    Cost: Collective. One process: no process group is needed.
    """
    leaves, _ = flatten(like)
    given = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    targets: dict[str, Any] = {}
    if given:
        with _plain_errors(f"checkpoint {str(path)!r} could not be loaded"):
            metadata = CheckpointReader(path).read_metadata()
            if isinstance(metadata.storage_data, CheckpointError):
                raise metadata.storage_data
        index: ShardIndex = metadata.storage_data
        for name, saved in index.tensors.items():
            own = given.get(name, given.get(name.rpartition(".")[0]))
            if own is not None and saved.shape == tuple(own.shape):
                targets[name] = torch.empty_like(
                    own, dtype=dtype_of(saved), requires_grad=False, device=own.device
                )
        paths = {name: index.paths[name] for name in targets}
        targets = unflatten(targets, paths)
    return load_into(path, targets, process_group=process_group)


class _AbandonedError(CheckpointError):
    """A process could not continue because another one had failed."""


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise what went wrong in some process instead of torch's collection of tracebacks."""
    try:
        with warnings.catch_warnings():
            # With one process there need not be a group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        errors = {rank: error for rank, (error, _) in sorted(failed.failures.items())}
        causes = [rank for rank in errors if not isinstance(errors[rank], _AbandonedError)]
        rank = causes[0] if causes else min(errors)
        error = errors[rank]
        if not isinstance(error, Exception):
            raise error from None
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        reason = str(error) if isinstance(error, CheckpointError) else repr(error)
        where = f" in process {rank}" if len(causes) == 1 else ""
        raise kind(f"{what}{where}: {reason}") from None
