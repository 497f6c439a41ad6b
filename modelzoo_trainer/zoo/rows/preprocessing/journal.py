"""The state of an unfinished run in its output folder, from which the next one continues.

The folder of every stream has `INCOMPLETE.json` until all is done, so that nobody trains on a part
of the rows. Beside it in the output folder is the state, replaced at once: the next unit, and of
each stream the number of files and what does not fill one yet. Files that are newer than the state
are written again, with equal bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.rows.hdf5_format import INCOMPLETE, PARAMS, SUFFIX
from modelzoo_trainer.zoo.rows.interface import Array, Stats
from modelzoo_trainer.zoo.rows.places import DocumentPlace
from modelzoo_trainer.zoo.rows.preprocessing.output import PART, write_bytes, write_text

STATE: Final = "INCOMPLETE.npz"
_FORMAT: Final = 2  # increase it when the same settings and input give other bytes
_OF_THE_RUN: Final = {
    "setup": ("processes", "output_dir", "data_splits_dir"),
    "processing": ("resume_from_checkpoint", "fraction_of_RAM_alloted", "write_in_batch"),
}
"""Settings that do not change the rows."""
_CODE: Final = ("read_hook", "custom_tokenizer", "token_generator")
_WHAT: Final = {
    "settings": "settings",
    "inputs": "input files",
    "tokenizer": "files of the tokenizer",
    "read_hook": "contents of the module of processing.read_hook",
    "custom_tokenizer": "contents of the module of processing.custom_tokenizer",
    "token_generator": "contents of the module of setup.token_generator",
}
_ACCEPT: Final = (
    " If the change does not concern the rows that are written, remove {name!r} from {mark} to "
    "continue."
)


@dataclass(slots=True)
class StreamState:
    """What is known of a stream."""

    num_files: int = 0
    stats: Stats = field(default_factory=Stats)
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """All units before `unit` are in files or in the arrays."""

    unit: int = 0
    is_read: bool = False
    tokens: int = 0
    streams: list[StreamState] = field(default_factory=list)


def rows_settings(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of a file without those that do not change the rows."""
    return {
        section: {key: one for key, one in keys.items() if key not in _OF_THE_RUN.get(section, ())}
        for section, keys in given.items()
    }


def check_empty(folder: Path) -> None:
    """Check that a folder has no rows.

    Raises:
        ConfigError: If it has.
    """
    found = [folder / PARAMS] if (folder / PARAMS).exists() else [*folder.glob(f"*{SUFFIX}")]
    if found:
        raise ConfigError(
            f"setup.output_dir: {str(folder)!r} already has rows ({found[0].name}). Choose another "
            "folder, or remove it."
        )


def digest_of(value: Any) -> str:
    """Return a digest of plain values."""
    content = json.dumps([_FORMAT, value], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


class Journal:
    """The marks and the state of a run.

    Args:
        root: The output folder.
        folders: Of the streams; `root` may be one of them.
        identity: Digests of what determines the rows, by the names in `_WHAT`.
    """

    def __init__(self, root: Path, folders: Sequence[Path], identity: Mapping[str, str]) -> None:
        self._root = root
        self._folders = list(dict.fromkeys((root, *folders)))
        self._mark = dict(identity)
        self._lock: int | None = None

    def open(self) -> State | None:
        """Mark the folders, and return the state of the run that is continued.

        Returns:
            None for a new run.

        Raises:
            ConfigError: If a folder has other rows or an unfinished run of another identity, or
                another process is writing to it.
        """
        mark = self._root / INCOMPLETE
        if not mark.exists():
            for folder in self._folders:
                check_empty(folder)
            for folder in reversed(self._folders):  # the root last: it makes the others known
                _make(folder)
                if folder != self._root:
                    write_text(folder / INCOMPLETE, _as_text({"part_of": "the folder above"}))
            (self._root / STATE).unlink(missing_ok=True)  # of a run whose mark was removed
            write_text(mark, _as_text(self._mark))
        self._take_lock(mark)
        self._check_same(mark)
        for folder in self._folders:
            _make(folder)
            for part in folder.glob(f"*{PART}"):
                part.unlink()
            if folder != self._root and not (folder / INCOMPLETE).exists():
                write_text(folder / INCOMPLETE, _as_text({"part_of": "the folder above"}))
        return self._read()

    def save(self, state: State) -> None:
        """Replace the state, durably. The files that it counts must be durable already."""
        facts = {
            "unit": state.unit,
            "is_read": state.is_read,
            "tokens": state.tokens,
            "streams": [
                {"num_files": one.num_files, "stats": asdict(one.stats), "facts": one.facts}
                for one in state.streams
            ],
        }
        arrays = {
            f"{index}/{name}": array
            for index, one in enumerate(state.streams)
            for name, array in one.arrays.items()
        }
        text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, **{"facts": text, **arrays})  # type: ignore[arg-type]  # numpy's stubs
        write_bytes(self._root / STATE, content.getvalue())

    def finish(self) -> None:
        """Remove the marks and the state: the run is complete."""
        (self._root / STATE).unlink(missing_ok=True)
        for folder in reversed(self._folders):  # the root last
            (folder / INCOMPLETE).unlink(missing_ok=True)
        self.close()

    def abandon(self) -> None:
        """Remove the marks and the state, and the folders that are empty then."""
        self.finish()
        for folder in reversed(self._folders):
            for one in (folder, *folder.parents):
                with suppress(OSError):  # it is not empty
                    one.rmdir()
                if one == self._root:
                    break

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> State | None:
        path = self._root / STATE
        if not path.exists():
            return None
        try:
            return _state(path)
        except Exception as error:  # a damaged archive raises many types
            self.close()
            raise _unreadable(path, reason_of(error)) from error

    def _check_same(self, mark: Path) -> None:
        there = _content(mark)
        for name, what in _WHAT.items():
            if name in _CODE and name not in there:
                continue  # the user has removed it
            if there.get(name) != self._mark.get(name):
                self.close()
                raise ConfigError(
                    f"setup.output_dir: {str(self._root)!r} has an unfinished run with other "
                    f"{what}. Restore them to continue it, choose another folder, or remove it."
                    + (_ACCEPT.format(name=name, mark=mark) if name in _CODE else "")
                )

    def _take_lock(self, mark: Path) -> None:
        """Lock the folder until this process ends, where the system has such locks."""
        try:
            import fcntl
        except ImportError:
            return
        self._lock = os.open(mark, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"setup.output_dir: another process is writing to {str(self._root)!r}. Wait for "
                "it, or choose another folder."
            ) from error


def _state(path: Path) -> State:
    with path.open("rb") as file, np.load(file) as stored:
        facts = json.loads(stored["facts"].tobytes())
        streams = [
            StreamState(one["num_files"], _stats(one["stats"]), one["facts"])
            for one in facts.pop("streams")
        ]
        for key in stored.files:
            if key != "facts":
                index, name = key.split("/", 1)
                streams[int(index)].arrays[name] = stored[key]
    return State(**facts, streams=streams)


def _content(mark: Path) -> dict[str, Any]:
    try:
        there = json.loads(mark.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(mark, reason_of(error)) from error
    if not isinstance(there, dict):
        raise _unreadable(mark, "it is not a JSON object")
    return there


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"setup.output_dir: {str(path)!r}, which an unfinished run needs to continue, cannot be "
        f"read: {reason}. Restore it, or remove the folder to start again."
    )


def _stats(stored: dict[str, Any]) -> Stats:
    skipped = {
        reason: (count, DocumentPlace(*first))
        for reason, (count, first) in stored.pop("skipped").items()
    }
    return Stats(**stored, skipped=skipped)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"setup.output_dir: {str(folder)!r} cannot be created: {reason_of(error)}."
        ) from error


def _as_text(content: Mapping[str, Any]) -> str:
    said = "The rows here are incomplete. Run data_preprocess again to continue."
    return json.dumps({"note": said, **content}, indent=1, sort_keys=True) + "\n"
