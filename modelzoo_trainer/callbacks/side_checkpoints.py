"""Checkpoints beside those of a run: their writing, as a directory or as a file of weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callbacks.checkpoint_files import (
    FILE_SUFFIX,
    check_is_apart,
    free_path,
    remove,
    save_state,
    state_of,
)
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.errors import CheckpointError, ConfigError, DiskError, is_refusal_of_disk

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


def check_is_directory(where: str, template: str) -> None:
    """Raise a `ConfigError` if a name of checkpoints is one of files of weights.

    Args:
        where: The argument, for the message.
        template: What it is.
    """
    if template.endswith(FILE_SUFFIX):
        raise ConfigError(
            f"{where} is {template!r}; a checkpoint is a directory. Leave out {FILE_SUFFIX}, which "
            f"is the end of files of weights."
        )


class SideCheckpoints:
    """Writes what a callback wants to keep besides the run's own checkpoints.

    A disk that refuses is logged; the run goes on.

    Args:
        owner: The callback, for messages.
        folder: Within `model_dir`, so that nobody else writes there.
        states: Names of the parts, or "all".
        averaged: Write the averaged weights of `ModelEma` instead of the model's.

    Raises:
        ConfigError: If the folder is not within.
    """

    def __init__(
        self, owner: str, folder: str, states: tuple[str, ...] = ("all",), *, averaged: bool = False
    ) -> None:
        place = Path(folder) if isinstance(folder, str) and folder else Path("..")
        if place.is_absolute() or ".." in place.parts:
            raise ConfigError(
                f"{owner}.folder is {folder!r}; it must be a path within model_dir, such as "
                f"'extra'."
            )
        self._owner = owner
        self._folder = folder
        self._states = states
        self._averaged = averaged

    def root(self, trainer: Trainer) -> Path:
        """Return the folder."""
        return trainer.model_dir / self._folder

    def check_is_apart(self, where: str, trainer: Trainer, template: str) -> None:
        """Raise a `ConfigError` if a run would take what is written for its own checkpoint.

        Args:
            where: The argument that names it, for the message.
            trainer: Whose run it is.
            template: Its name, with the field `{step}`.
        """
        example = self.root(trainer) / template.format(step=0)
        if trainer.checkpoint.is_in_folder(trainer, example):
            check_is_apart(where, trainer, example.name)

    def prepare(self, trainer: Trainer) -> None:
        """Make sure that something can be written in the folder, before hours are spent.

        Raises:
            ConfigError: If nothing can.
        """
        if trainer.backend.is_main and trainer.backend.caps.holds_values:
            root = self.root(trainer)
            try:
                checkpointing.probe(root)
            except CheckpointError as error:
                raise ConfigError(f"{self._owner}.folder: {error}") from None
            checkpointing.clean(root)

    def write(self, trainer: Trainer, name: str, *, replaces: bool = False) -> str | None:
        """Write what the run is now.

        Args:
            trainer: At a step boundary.
            name: A file of weights, if it ends in .safetensors; else a checkpoint.
            replaces: What is there under the name was written by this run, before it was resumed,
                and goes. Otherwise it stays, and another name is used.

        Returns:
            The name that it has; None = the disk has refused it.
        """
        if not trainer.backend.caps.holds_values:
            return None
        trainer.drain()
        trainer.checkpoint.finish(trainer)  # one that is under way speaks in the same group
        if trainer.backend.is_main:
            name = self._make_room(trainer, name, replaces=replaces)
        name = trainer.backend.broadcast_object(name)
        try:
            with self._weights(trainer):
                self._write(trainer, self.root(trainer) / name)
        except CheckpointError as error:
            if not is_refusal_of_disk(error):
                raise
            log.error("%s WAS NOT WRITTEN: %s", self.root(trainer) / name, error)
            return None
        log.info("Saved %s.", self.root(trainer) / name)
        return name

    def delete(self, trainer: Trainer, names: Iterable[str]) -> None:
        """Delete what was written under some names."""
        if not trainer.backend.is_main:
            return
        for name in names:
            path = self.root(trainer) / name
            if not name.endswith(FILE_SUFFIX):
                remove(path)
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error)

    def _weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the weights that are to be written."""
        if not self._averaged:
            return nullcontext()
        ema = trainer.get_callback(ModelEma)
        return nullcontext() if ema is None or not ema.has_average else ema.swap()

    def _make_room(self, trainer: Trainer, name: str, *, replaces: bool) -> str:
        """Return a name that is free now."""
        path = self.root(trainer) / name
        if replaces and os.path.lexists(path):
            self.delete(trainer, [name])
        return free_path(path).name

    def _write(self, trainer: Trainer, path: Path) -> None:
        backend = trainer.backend
        if path.suffix != FILE_SUFFIX:
            save_state(trainer, path, self._state(trainer, self._states))
            return
        if not backend.caps.sharded_state:
            model = backend.writable(self._state(trainer, ("model",))["model"])
            self._write_file(trainer, partial(checkpointing.write_weights, model, path))
            return
        # Through a checkpoint: that can be written by several processes, the file by one.
        folder = path.with_name(backend.broadcast_object(hidden_name("tmp", path.stem)))
        save_state(trainer, folder, self._state(trainer, ("model",)))
        try:
            self._write_file(trainer, partial(checkpointing.export, folder, path))
        finally:
            if backend.is_main:
                checkpointing.delete(folder)

    def _write_file(self, trainer: Trainer, write: Callable[[], object]) -> None:
        """Have the first process write a file; if that fails, it fails on all of them."""
        failure = _failure_of(write) if trainer.backend.is_main else None
        failure = trainer.backend.broadcast_object(failure)
        if failure is not None:
            message, is_refusal = failure
            raise DiskError(message) if is_refusal else CheckpointError(message)

    def _state(self, trainer: Trainer, states: tuple[str, ...]) -> dict[str, Any]:
        return state_of(trainer, f"{self._owner}.checkpoint_states", states)


def _failure_of(write: Callable[[], object]) -> tuple[str, bool] | None:
    """Write something; return what went wrong, if anything, and whether it was the disk."""
    try:
        write()
    except CheckpointError as error:
        return str(error), is_refusal_of_disk(error)
    return None
