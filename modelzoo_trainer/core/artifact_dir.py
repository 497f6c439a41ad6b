"""The folders of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class ArtifactDir(CoreCallback):
    """Makes `model_dir` and in it `logs/<time>`, which `logs/latest` points to.

    Raises:
        ConfigError: At set-up, if the folders cannot be made.
    """

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        logs = trainer.model_dir / "logs"
        name = time.strftime("%Y%m%d_%H%M%S")
        if trainer.backend.is_main:
            name = self._make(logs, name)
        trainer.artifact_dir = logs / trainer.backend.broadcast_object(name)
        trainer.summary_dir = trainer.artifact_dir

    def _make(self, logs: Path, name: str) -> str:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            number = 1
            unique = name
            while not _made(logs / unique):  # another run began in the same second
                number += 1
                unique = f"{name}_{number}"
            _point(logs / "latest", unique)
        except OSError as error:
            raise ConfigError(
                f"model_dir {str(logs.parent)!r} cannot be used: {error.strerror or error} "
                f"({error.filename}). Choose a folder that can be written."
            ) from None
        return unique


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
