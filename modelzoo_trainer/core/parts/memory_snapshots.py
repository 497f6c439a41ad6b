"""Snapshots of a run in memory of its machine, for a restart after a crash of its processes."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import PositiveInt
from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.folder import refuse_newer
from modelzoo_trainer.checkpointing.slots import is_in_memory, save_in_place
from modelzoo_trainer.checkpointing.stores.record import write_atomically
from modelzoo_trainer.core.parts.checkpoint_writer import least_bytes
from modelzoo_trainer.errors import (
    CheckpointError,
    ConfigError,
    folder_reason,
    in_bytes,
    is_refusal_of_disk,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_SHARED_MEMORY: Final = Path("/dev/shm")  # a file system in memory, on Linux
_ID: Final = ".memory_id"
_SLOTS: Final = ("memory_0", "memory_1")
_RUN: Final = "run.json"
_MOST_BYTES: Final = 1 << 20  # of such a file
_USED: Final = "used.json"
_KEY: Final = "memory"  # of the facts of a snapshot
_MAX_USES: Final = 2  # of one snapshot, without a later one: it may be what fails
_HEADROOM: Final = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The setting `checkpoint.memory`."""

    steps: PositiveInt
    """Write a snapshot on every n-th step."""
    path: str | None = None
    """A folder on a file system in memory; None = /dev/shm."""

    @property
    def base(self) -> Path:
        """The folder of all runs."""
        return _SHARED_MEMORY if self.path is None else Path(self.path).expanduser()


class MemorySnapshots:
    """The newest states of a run in memory: two, one of which is always complete.

    A snapshot counts only for the same run in the same `model_dir`, with the same number of
    processes, while the newest checkpoint on disk is the one that was newest then.

    Args:
        settings: When and where.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self.settings = settings
        self._folder: Path | None = None  # None = off
        self._next = 0
        self._base: list[Any] | None = None
        self._group: Any = None
        self._begun: int | None = None

    # ---- the start

    def newer_than(self, trainer: Trainer, newest: Path | None) -> list[Path]:
        """Return the snapshots of this run that are newer than its newest checkpoint, newest first.

        Their content is not verified.
        """
        folder = self._known_folder(trainer)
        if folder is None:
            return []
        used = _read(folder / _USED)
        found = []
        for path in (folder / name for name in _SLOTS):
            refuse_newer(path)
            with suppress(CheckpointError):
                manifest = checkpointing.read_manifest(path)
                facts = manifest.facts.get(_KEY)
                step = manifest.step
                is_spent = step <= used.get("step", -1) and used.get("times", 0) >= _MAX_USES
                if not is_spent and self._fits(trainer, facts, newest, step):
                    found.append((step, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _fits(self, trainer: Trainer, facts: Any, newest: Path | None, step: int) -> bool:
        if not isinstance(facts, dict) or facts.get("run") != _facts_of_run(trainer):
            return False
        if newest is None:
            return facts.get("base") is None
        is_base = _identity(newest) == facts.get("base") or newest.name == facts.get("pending")
        return is_base and step > checkpointing.read_manifest(newest).step

    def holds(self, trainer: Trainer, path: Path) -> bool:
        """Return whether a path leads to a snapshot of this run."""
        folder = self._known_folder(trainer)
        is_there = folder is not None and path.resolve().parent == folder.resolve()
        return is_there and path.name in _SLOTS

    def _known_folder(self, trainer: Trainer) -> Path | None:
        text = _read(trainer.model_dir / _ID).get("id")
        return None if not isinstance(text, str) else _home(self.settings.base) / text

    def prepare(self, trainer: Trainer, begun: Path | None, newest: Path | None) -> None:
        """Create the folder at the start of a fit, and remove snapshots that no longer count.

        `begun`: the snapshot from which the fit starts. `newest`: the newest checkpoint on disk.

        Raises:
            ConfigError: If the folder cannot be used, has too little space, or is not on the host
                of all processes.

        Cost: Collective.
        """
        comm = trainer.backend.comm
        problem = token = None
        if comm.is_main:
            try:
                self._folder = self._make_folder(trainer)
                token = secrets.token_hex(8)
                self._take_over(trainer, token, begun)
            except OSError as error:
                why = folder_reason(self.settings.base, error)
                problem = f"{why}. Choose another folder, or free memory"
            except ConfigError as error:
                problem = str(error)
        problem = comm.broadcast_object(problem)
        if problem is not None:
            self._folder = None
            raise ConfigError(f"checkpoint.memory: {str(self.settings.base)!r}: {problem}")
        folder, token = comm.broadcast_object([str(self._folder), token])
        self._folder = Path(folder)
        if comm.any_true(_read(self._folder / _RUN).get("token") != token):
            raise ConfigError(
                f"checkpoint.memory: {folder!r} is not the same folder for all processes. "
                f"Snapshots require that all are on one host; remove checkpoint.memory."
            )
        if comm.process_group is not None:
            # Not the group of checkpoints: one may be written in the background.
            self._group = self._group or comm.new_process_group()
        self._next = 1 - _SLOTS.index(begun.name) if begun is not None else 0
        self._begun = None if begun is None else trainer.global_step
        self.note_newest(newest)

    def _make_folder(self, trainer: Trainer) -> Path:
        base = self.settings.base
        if not base.is_dir():
            raise ConfigError("it is not a folder. Set checkpoint.memory.path to one on tmpfs.")
        if is_in_memory(base) is False:
            log.warning(
                "checkpoint.memory.path %s is on a disk: snapshots are slow there, and wear it. "
                "Use a folder on tmpfs, such as %s.",
                base,
                _SHARED_MEMORY,
            )
        home = _home(base)
        with suppress(FileExistsError):
            home.mkdir(0o700)
        status = home.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_own or status.st_mode & 0o077:
            raise ConfigError(
                f"{str(home)!r} is not a folder that only this user may open. Remove it."
            )
        _remove_ended(home)
        name = _read(trainer.model_dir / _ID).get("id")
        if not isinstance(name, str) or not name.isalnum():
            name = secrets.token_hex(16)
            _write(trainer.model_dir / _ID, {"id": name})
        folder = home / name
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        return folder

    def _take_over(self, trainer: Trainer, token: str, begun: Path | None) -> None:
        assert self._folder is not None
        if begun is None:  # snapshots of another state
            for name in (*_SLOTS, _USED):
                _remove(self._folder / name)
        home = os.path.realpath(trainer.model_dir)
        _write(self._folder / _RUN, {"model_dir": home, "token": token})
        usage = shutil.disk_usage(self._folder)
        free = usage.free + sum(file.stat().st_size for file in self._folder.rglob("*.safetensors"))
        needed = int(_HEADROOM * len(_SLOTS) * least_bytes(trainer))
        if free < needed:
            raise ConfigError(
                f"it has {in_bytes(free)} of free space, and two snapshots take at least "
                f"{in_bytes(needed)}. Free memory, increase the size of that file system, or "
                f"remove checkpoint.memory."
            )

    # ---- while training

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot is due after a step."""
        return self._folder is not None and step % self.settings.steps == 0

    def note_newest(self, newest: Path | None) -> None:
        """Take note of the newest checkpoint on disk."""
        self._base = None if newest is None else _identity(newest)

    def note_use(self, trainer: Trainer) -> None:
        """Count a use of the snapshot from which the fit starts: training begins."""
        begun, self._begun = self._begun, None
        if begun is not None and self._folder is not None and trainer.backend.comm.is_main:
            with suppress(OSError):
                used = _read(self._folder / _USED)
                times = used.get("times", 0) + 1 if used.get("step") == begun else 1
                _write(self._folder / _USED, {"step": begun, "times": times})

    def save(self, trainer: Trainer, state: Mapping[str, Any], pending: Path | None) -> None:
        """Write a snapshot over the older one.

        `pending`: the checkpoint that is being written in the background. If there is no space,
        snapshots end with a warning; training continues.

        Raises:
            CheckpointError: If the state has a value that cannot be saved.
        """
        assert self._folder is not None
        path, self._next = self._folder / _SLOTS[self._next], 1 - self._next
        facts = {
            "run": _facts_of_run(trainer),
            "base": self._base,
            "pending": None if pending is None else pending.name,
        }
        try:
            save_in_place(
                path,
                state,
                step=trainer.global_step,
                facts={_KEY: facts},
                process_group=self._group,
            )
        except CheckpointError as error:
            if not is_refusal_of_disk(error):
                raise
            if trainer.backend.comm.is_main:
                log.warning("No more snapshots in memory in this fit: %s", error)
            self.remove(trainer)

    def remove(self, trainer: Trainer) -> None:
        """Remove the snapshots, and write no more in this fit."""
        folder, self._folder = self._folder, None
        if folder is not None and trainer.backend.comm.is_main:
            _remove(folder)

    def forget(self, trainer: Trainer) -> None:
        """Remove the snapshots after training has returned to an earlier state."""
        if self._folder is not None and trainer.backend.comm.is_main:
            for name in (*_SLOTS, _USED):
                _remove(self._folder / name)


def _home(base: Path) -> Path:
    return base / f"modelzoo_trainer-{os.getuid()}"


def _facts_of_run(trainer: Trainer) -> dict[str, Any]:
    return {
        "id": _read(trainer.model_dir / _ID).get("id"),
        "model_dir": os.path.realpath(trainer.model_dir),
        "world_size": trainer.backend.comm.world_size,
    }


def _identity(path: Path) -> list[Any] | None:
    """Return what tells a checkpoint from another one of its name; None = unreadable."""
    try:
        manifest = checkpointing.read_manifest(path)
    except CheckpointError:
        return None
    digests = sorted((name, one.xxh3_128) for name, one in manifest.files.items())
    text = json.dumps([manifest.step, digests])
    return [path.name, xxhash.xxh3_128_hexdigest(text.encode("ascii"))]


def _remove_ended(home: Path) -> None:
    """Remove the snapshots of this user's runs whose `model_dir` is gone."""
    for folder in home.iterdir():
        place = _read(folder / _RUN).get("model_dir")
        if isinstance(place, str) and not os.path.isdir(place):
            _remove(folder)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(file, most=_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(content).encode())


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
