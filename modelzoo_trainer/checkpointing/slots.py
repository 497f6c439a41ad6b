"""A checkpoint in memory: written again and again into the files of one directory on tmpfs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, SupportsIndex

from typing_extensions import override

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.file_writing import write_hashed
from modelzoo_trainer.checkpointing.load_save import write_state
from modelzoo_trainer.checkpointing.manifest import MANIFEST, FileRecord
from modelzoo_trainer.checkpointing.state_json import StateEncoder
from modelzoo_trainer.checkpointing.transaction import (
    CheckpointTransaction,
    WriteFile,
    check_step,
    plain_facts,
)

_PIECE: Final = 1 << 20  # bytes hashed and copied while they are in the cache
_MODE: Final = 0o700


def write_in_place(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file over an earlier one of its name, and return its record.

    Memory that the file already has is used again: touching fresh pages costs more than the copy.

    Raises:
        OSError: If writing fails, such as for lack of space.
    """
    fd = disk.open_again(path)
    try:
        record = write_hashed(fd, chunks, _PIECE)
        disk.truncate(fd, record.size_bytes)
    finally:
        disk.close(fd)
    return record


class SlotTransaction(CheckpointTransaction):
    """A checkpoint that replaces the one at its path, without a copy of both.

    The manifest is removed first and written last: after the process has ended at any time, the
    checkpoint is complete or absent. It does not outlive the machine.
    """

    @override
    def _begin(self) -> None:
        self.folder = self.path
        disk.unlink(self.folder / MANIFEST)
        with suppress(FileExistsError):
            self.folder.mkdir(_MODE)

    @override
    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], by: WriteFile = write_in_place
    ) -> FileRecord:
        return super().write(name, chunks, by)

    @override
    def _publish(self, text: bytes) -> None:
        for file in self.folder.iterdir():
            if file.name not in self.records:  # of the checkpoint before
                disk.unlink(file)
        write_in_place(self.folder / MANIFEST, [text])

    @override
    def _remove(self) -> None:
        disk.unlink(self.folder / MANIFEST)


def save_in_place(
    path: Path,
    state: Mapping[str, Any],
    *,
    step: SupportsIndex,
    facts: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> None:
    """Write a checkpoint over an earlier one at its path; nothing is synced.

    Args:
        path: The checkpoint; its parent must exist.
        state: As for `save`, or as for `save_sharded` with a group.
        step: The global step, >= 0.
        facts: Additional entries of the manifest.
        process_group: The ranks that save together; None = only this process.

    Raises:
        CheckpointError: If the state has a value that cannot be saved, or writing fails. There is
            no checkpoint then.

    Cost: No memory besides the files. Collective with a group.
    """
    plain_step, plain = check_step(step), plain_facts(facts or {})
    if process_group is not None:
        from modelzoo_trainer.checkpointing.distributed import save_sharded

        save_sharded(
            path,
            state,
            step=plain_step,
            facts=plain,
            process_group=process_group,
            by=write_in_place,
            begin=SlotTransaction,
        )
        return
    write_state(SlotTransaction(path), StateEncoder(state), plain_step, plain, by=write_in_place)


def is_in_memory(folder: Path) -> bool | None:
    """Return whether a folder is on a file system in memory; None = unknown.

    Uses the nearest existing parent folder.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    place = os.path.realpath(folder)
    found: tuple[int, str] | None = None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                words, _, rest = line.partition(" - ")
                point = words.split()[4].encode().decode("unicode_escape")
                is_in = place == point or place.startswith(point.rstrip("/") + "/")
                if is_in and (found is None or len(point) >= found[0]):
                    found = len(point), rest.split()[0]
    except OSError:
        return None
    return None if found is None else found[1] in ("tmpfs", "ramfs")
