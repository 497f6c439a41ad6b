"""Write a checkpoint atomically: commit all of it, or leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np
import torch

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    FileRecord,
    Manifest,
    is_file_name,
    parse_manifest,
)
from modelzoo_trainer.errors import CheckpointError, folder_reason

WriteFile: TypeAlias = Callable[[Path, Iterable[bytes | memoryview]], FileRecord]
"""Writes a new file durably, as `write_file` does."""


class CheckpointTransaction:
    """A checkpoint being written, in a hidden folder beside its path.

    `commit` renames it to its path; otherwise `discard` (or leaving the `with` block) removes it.

    Raises:
        CheckpointError: If the name is in use, or writing fails. Nothing is left behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # does not resolve links
        self.folder = self.path.with_name(hidden_name("tmp", self.path.name))
        self.records: dict[str, FileRecord] = {}
        self.elsewhere: set[str] = set()
        """Files that other hosts have uploaded to an object store; not in the folder."""
        self.attempt = ""
        """The name of the attempt under which they did."""
        self._is_done = False
        with self._whole():
            self._begin()

    def _begin(self) -> None:
        self._check_free()
        disk.make_folder(self.path.parent)
        disk.make_new_folder(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], by: WriteFile = write_file
    ) -> FileRecord:
        """Write a file durably.

        `name`: letters, digits, `_` and `-`, then `.safetensors` or `.json`. `by`: what writes it.

        Returns:
            Its record, also in `records`: of the data passed in, not of the data on disk.

        Raises:
            CheckpointError: If writing fails. The transaction is discarded.
        """
        with self._whole():
            if not is_file_name(name) or name in self.records or name == MANIFEST:
                raise CheckpointError(
                    f"{name!r} is not a valid name for a new file in a checkpoint. Use letters, "
                    f"digits, _ and -, then .safetensors or .json, and each name only once."
                )
            self.records[name] = by(self.folder / name, chunks)
        return self.records[name]

    def commit(self, *, step: SupportsIndex, facts: Mapping[str, Any] | None = None) -> None:
        """Write the manifest and rename the folder to its path, durably.

        Raises:
            CheckpointError: If a file of `records` is missing, the name is in use by now, or
                writing fails. The transaction is discarded.
        """
        with self._whole():
            for name, record in self.records.items():
                if name not in self.elsewhere:
                    self._check_there(name, record)
            attempt = self.attempt if self.elsewhere else ""
            text = _manifest_text(self.path, self.records, step, facts or {}, attempt)
            self._publish(text.encode("ascii"))
            self._is_done = True

    def _publish(self, text: bytes) -> None:
        """Write the manifest and make the checkpoint visible."""
        write_file(self.folder / MANIFEST, [text])
        disk.sync_folder(self.folder)
        self._check_free()  # check again: a rename would replace an empty directory
        disk.rename(self.folder, self.path)
        self._sync_name()

    def discard(self) -> None:
        """Remove the files; a no-op after `commit`."""
        if not self._is_done:
            self._is_done = True
            with suppress(OSError):
                self._remove()

    def _remove(self) -> None:
        disk.remove_tree(self.folder)

    def _check_free(self) -> None:
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{str(self.path)!r} already exists; checkpoints are never overwritten. Use "
                f"another name."
            )

    def _check_there(self, name: str, record: FileRecord) -> None:
        """Check that a file reported by another rank is on this disk."""
        file = self.folder / name
        size = file.stat().st_size if file.exists() else None
        if size != record.size_bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"Checkpoint {str(self.path)!r} cannot be committed: {name!r} {found}, expected "
                f"{record.size_bytes} bytes. All processes must write to the same file system."
            )

    def _sync_name(self) -> None:
        """Wait until the new name is durable; undo the rename if that fails."""
        try:
            disk.sync_folder(self.path.parent)
        except BaseException:
            with suppress(OSError):
                disk.rename(self.path, self.folder)
            raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.discard()
            if not isinstance(error, OSError):
                raise
            why = folder_reason(self.path.parent, error)
            raise CheckpointError(
                f"Checkpoint {str(self.path)!r} could not be saved: {why}. Earlier checkpoints are "
                f"not affected."
            ) from error


def check_step(step: SupportsIndex) -> int:
    """Return a step as an int.

    Raises:
        CheckpointError: If it is not an integer >= 0.
    """
    try:
        plain = -1 if isinstance(step, bool) else index(step)
    except TypeError:
        plain = -1
    if plain < 0:
        raise CheckpointError(f"step: expected an integer >= 0, got {step!r}.")
    return plain


def _manifest_text(
    path: Path,
    records: Mapping[str, FileRecord],
    step: SupportsIndex,
    facts: Mapping[str, Any],
    attempt: str,
) -> str:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=path.name,
        step=check_step(step),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        files=dict(records),
        facts=plain_facts(facts),
        attempt=attempt,
    )
    text = manifest.to_json()
    parse_manifest(text, path)  # do not commit what cannot be read
    return text


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as they will be read: numbers that JSON lacks become text, such as "nan".

    Raises:
        CheckpointError: If they contain anything but text, numbers, lists and mappings.
    """
    try:
        found = json.loads(json.dumps(_finite(facts), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"facts cannot be saved: {error}. Use strings, numbers, lists and dicts with string "
            f"keys."
        ) from None
    return dict(found)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise TypeError(f"keys must be strings, got {list(value)!r}")
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
