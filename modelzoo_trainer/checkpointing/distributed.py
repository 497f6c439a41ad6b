"""Checkpoints written by several ranks, through torch.distributed.checkpoint.

torch plans who writes what and stages asynchronous saves; the layout on disk is ours:

    shard-00000.safetensors  blocks of sharded tensors, of rank 0
    whole-00000.safetensors  its whole tensors; without blocks they are in the file above
    values-00000.json        its other values
    shards.json              which file has which block of each tensor
    manifest.json            written last; then the directory is renamed
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.shard_index import SHARDS, ShardIndex
from modelzoo_trainer.checkpointing.shard_writing import (
    CheckpointSavePlanner,
    Share,
    abandon,
    index_of,
    records_of,
    upload_share,
    uploaded_of,
    write_share,
)
from modelzoo_trainer.checkpointing.sharded import dtype_of, flatten, unflatten
from modelzoo_trainer.checkpointing.stores.apart import attempt_for, lies_apart
from modelzoo_trainer.checkpointing.transaction import CheckpointTransaction, WriteFile
from modelzoo_trainer.errors import CheckpointError, DiskError, is_refusal_of_disk


class CheckpointWriter(StorageWriter):
    """Write a checkpoint for `torch.distributed.checkpoint.save` and `async_save`.

    Every rank writes one file of tensors; the main process commits them all with one rename. If
    any rank fails, nothing is committed and nothing is left behind. Other values are written as
    JSON; nothing is pickled. Values that differ between ranks, such as random generators, need
    different keys: of equal keys, one rank's value is kept. With torch's own planner, integer keys
    of dicts become strings and empty dicts are lost, as in torch's own format;
    `CheckpointSavePlanner` keeps both.

    Args:
        path: The checkpoint; must not exist, in a folder shared by all ranks.
        step: The global step, for the manifest.
        facts: Additional entries of the manifest.
        by: What writes this rank's files.
        begin: What makes the checkpoint, on the main process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int,
        facts: Mapping[str, Any] | None = None,
        by: WriteFile = write_file,
        begin: Callable[[Path], CheckpointTransaction] = CheckpointTransaction,
    ) -> None:
        self.path = Path(path)
        self.step = step
        self.facts = facts
        self._by, self._begin = by, begin
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
                "CheckpointWriter requires use_collectives=True, because all ranks commit the "
                "checkpoint together."
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:
            raise CheckpointError(
                "The planner has enable_plan_caching=True: with cached plans, ranks would write "
                "into the directory of an earlier checkpoint. Pass a planner with "
                "enable_plan_caching=False."
            )
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        try:
            self._transaction = self._begin(self.path)
        except CheckpointError as error:
            if is_refusal_of_disk(error):
                raise DiskError(str(error)) from error.__cause__
            raise
        self._world_size = len(plans)
        folder = str(self._transaction.folder)
        attempt = self._transaction.attempt = attempt_for(self.path)
        return [
            replace(plan, storage_data=Share(folder=folder, rank=rank, attempt=attempt))
            for rank, plan in enumerate(plans)
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: Share = plan.storage_data
        is_apart = bool(share.attempt) and lies_apart(self.path)
        try:
            if is_apart:
                results = upload_share(share, self.path, plan.items, planner, self._by)
            else:
                results = write_share(share, plan.items, planner, self._by)
        except BaseException as error:
            is_gone = not is_apart and not Path(share.folder).exists()
            if isinstance(error, FileNotFoundError) and is_gone:
                raise _AbandonedError(
                    f"{share.folder!r} was not saved: another process failed."
                ) from error
            abandon(Path(share.folder))
            if not isinstance(error, OSError):
                raise
            reason = str(error.strerror or error).removesuffix(".")
            text = f"{reason}. Earlier checkpoints are not affected."
            raise DiskError(text) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def discard(self) -> None:
        """Remove the checkpoint being written, on the rank that would commit it; else a no-op.

        For a save that ended in an error outside of its steps, such as a lost connection: torch
        does not pass those to its writer.
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
            transaction.elsewhere = uploaded_of(results)
            transaction.write(SHARDS, [index.to_json().encode("ascii")])
            transaction.commit(step=self.step, facts=self.facts)
        except BaseException as error:
            transaction.discard()
            if is_refusal_of_disk(error):
                raise DiskError(str(error)) from error.__cause__  # others get no cause
            raise
        self._transaction = None


def save_sharded(  # noqa: PLR0913  # what torch takes, and what writes
    path: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    facts: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
    by: WriteFile = write_file,
    begin: Callable[[Path], CheckpointTransaction] = CheckpointTransaction,
) -> None:
    """Write a checkpoint together with the other ranks. Collective.

    Args:
        path: The checkpoint; must not exist, in a folder shared by all ranks.
        state: As for `save`; also with DTensors and ShardedTensors. Each key has the same value on
            all ranks, or their part of it.
        step: The global step, for the manifest.
        facts: Additional entries of the manifest.
        process_group: The ranks that save, over a backend for host memory; None = all.
        by: What writes this rank's files.
        begin: What makes the checkpoint, on the main process.

    Raises:
        CheckpointError: On every rank, if any of them fails. Nothing is left behind.
        Exception: Raised by the process group if a rank is lost. Nothing is left behind.

    Cost: Collective. A single process needs no process group.
    """
    writer = CheckpointWriter(path, step=step, facts=facts, by=by, begin=begin)
    try:
        with _plain_errors(f"Checkpoint {str(path)!r} could not be saved"):
            save_planned(
                dict(state),
                storage_writer=writer,
                planner=CheckpointSavePlanner(),
                process_group=process_group,
            )
    except BaseException:
        writer.discard()  # also after a lost connection
        raise


def load_into(
    path: Path, state: Mapping[str, Any], *, process_group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Load a checkpoint in place, on any number of ranks. Collective.

    Args:
        path: The checkpoint, written by any number of ranks.
        state: Tensors and DTensors, filled in place where the checkpoint has the same names; may be
            empty.
        process_group: The ranks that load, over a backend for host memory; None = all.

    Returns:
        All of the checkpoint's state: the tensors of `state` where it has them, other tensors whole
        in host memory.

    Raises:
        CheckpointMismatch: If a tensor of `state` is missing, or has another shape or dtype.
        CheckpointError: On every rank, if the checkpoint is damaged for any of them. Nothing has
            been changed then.

    Cost: Collective. A single process needs no process group.
    """
    planner = CompleteLoadPlanner()
    with _plain_errors(f"Checkpoint {str(path)!r} could not be loaded"):
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
    """Load a checkpoint into new tensors, on any number of ranks. Collective.

    Args:
        path: The checkpoint, written by any number of ranks.
        like: Tensors by names of the checkpoint, or by prefixes of names. A saved tensor of the
            same shape is sharded like it; `like` itself is not changed.
        process_group: The ranks that load, over a backend for host memory; None = all.

    Returns:
        All of the checkpoint's state; tensors without a match in `like` whole, in host memory.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged for any of them.

    Cost: Collective. A single process needs no process group.
    """
    leaves, _ = flatten(like)
    given = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    targets: dict[str, Any] = {}
    if given:
        with _plain_errors(f"Checkpoint {str(path)!r} could not be loaded"):
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
    """Another process has failed, so this one cannot continue."""


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise the first error of a rank instead of torch's collection of tracebacks."""
    try:
        with warnings.catch_warnings():
            # A single process may have no group.
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
