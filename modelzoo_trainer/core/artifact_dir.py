"""The folders of a run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.checkpointing.stores.mirror import mirror_of
from modelzoo_trainer.checkpointing.stores.urls import is_url, parse_url
from modelzoo_trainer.core.run_lock import LOCK_NAME
from modelzoo_trainer.errors import ConfigError, unusable

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

PARAMS: Final = "params.yaml"
"""The file with the configuration that the command line writes to a log folder."""
_PATIENCE_S: Final = 10.0


def folder_of(argument: str, folder: Any) -> Path:
    """Return a folder given by a user, as a path.

    `argument`: its name, for messages.

    Raises:
        ConfigError: If it cannot be a path.
    """
    if is_url(str(folder)):
        parse_url(str(folder), argument)
        raise ConfigError(
            f"{argument}: {str(folder)!r} is the URL of an object store, which only model_dir, "
            f"checkpoint.checkpoint_root and ckpt_path may be. Use a path."
        )
    if not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder):
        shown = str(folder) if isinstance(folder, Path) else folder
        raise ConfigError(f"{argument} must be a path without null bytes (\\0), got {shown!r}.")
    return Path(folder)


class ArtifactDir(CoreCallback):
    """Create `model_dir` and its `logs/<time>`, which `logs/latest` points to.

    Raises:
        ConfigError: At set-up, if the folders cannot be created.
    """

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        logs = trainer.model_dir / "logs"
        name = time.strftime("%Y%m%d_%H%M%S")
        if trainer.backend.comm.is_main:
            name = self._make(logs, name)
        trainer.artifact_dir = logs / trainer.backend.comm.broadcast_object(name)
        trainer.summary_dir = trainer.artifact_dir
        if trainer.backend.comm.world_size > 1:
            trainer.object_store.note_hosts(trainer)
            home = mirror_of(trainer.model_dir)
            if home is not None and home.is_apart:
                trainer.artifact_dir.mkdir(parents=True, exist_ok=True)
            _check_seen(trainer)

    def _make(self, logs: Path, name: str) -> str:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            number = 1
            unique = name
            while not _made(logs / unique):  # another run started in the same second
                number += 1
                unique = f"{name}_{number}"
            _point(logs / "latest", unique)
        except OSError as error:
            raise unusable("model_dir", logs.parent, error) from None
        return unique


def remove_unused(trainer: Trainer) -> None:
    """Remove `model_dir` if this trainer created it, has run nothing, and nothing else is in it."""
    if trainer.result is not None or not trainer.callbacks["run_lock"].has_created:
        return
    folder, logs = trainer.model_dir, trainer.model_dir / "logs"
    with suppress(OSError):  # of no importance, or no longer there
        own = {LOCK_NAME, "logs"}, {"latest", trainer.artifact_dir.name}, {PARAMS}
        folders = folder, logs, trainer.artifact_dir
        if any(set(os.listdir(one)) - names for one, names in zip(folders, own, strict=True)):
            return
        for path in (trainer.artifact_dir / PARAMS, logs / "latest", folder / LOCK_NAME):
            path.unlink(missing_ok=True)
        for empty in reversed(folders):
            empty.rmdir()


def _check_seen(trainer: Trainer) -> None:
    """Check that all processes see the folder created by the main process.

    Raises:
        ConfigError: On all of them, if one does not.
    """
    deadline = time.monotonic() + _PATIENCE_S  # a network file system may lag
    while not (is_seen := trainer.artifact_dir.is_dir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = trainer.backend.comm.gather_object(is_seen)
    if not all(seen):
        raise ConfigError(
            f"Process {seen.index(False)} cannot see files that process 0 wrote to "
            f"model_dir={str(trainer.model_dir)!r}. Set model_dir to a folder on a file system "
            f"that all processes share, or to the URL of an object store."
        )


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _point(link: Path, target: str) -> None:
    fresh = link.with_name(f".{target}.latest")
    fresh.symlink_to(target)
    fresh.replace(link)
