"""Shared code of callbacks that write or delete checkpoints."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Predicate

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.checkpointing.folder import hidden_name, name_pattern
from modelzoo_trainer.checkpointing.manifest import SUFFIX
from modelzoo_trainer.core.checkpoint import saving
from modelzoo_trainer.core.parts.states import part_of
from modelzoo_trainer.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    ModelZooError,
    is_refusal_of_disk,
    suggest,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


def part_names(where: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of checkpoint parts that an argument lists.

    Raises:
        ConfigError: If no part is named.
    """
    names = given.split(",") if isinstance(given, str) else given
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    found = tuple(name.strip() for name in names) if is_list else ()
    if not found or not all(found):
        raise ConfigError(
            f"{where} must name parts of a checkpoint, such as 'model' or 'model,optimizer'; got "
            f"{given!r}."
        )
    return found


def parts_of(where: str, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named parts of a state, and the parts `__*`.

    Raises:
        ConfigError: If there is no such part.
    """
    require_parts(f"{where}: a checkpoint of this run", state, names, ConfigError)
    wanted = set(names)
    return {key: part for key, part in state.items() if key in wanted or key.startswith("__")}


def require_parts(
    what: str, state: Mapping[str, Any], names: Iterable[str], error: type[ModelZooError]
) -> None:
    """Raise an error of the given type unless a state has all parts."""
    for name in names:
        if name not in state:
            raise error(f"{what} has no state {name!r}. {suggest(name, state, cutoff=0.75)}")


def holds_once(template: str, *fields: str) -> bool:
    """Return whether a template is a file name that contains each of these fields once."""
    try:
        found = Counter(part[1:] for part in Formatter().parse(template) if part[1] is not None)
    except ValueError:
        return False
    return found == Counter((field, "", None) for field in fields) and "/" not in template


def _is_within(folder: str) -> bool:
    return bool(folder) and not Path(folder).is_absolute() and ".." not in Path(folder).parts


StepName = Annotated[
    str,
    Predicate(lambda name: holds_once(name, "step")),
    "a file name with {step}, once",
]
SideFolder = Annotated[str, Predicate(_is_within), "a path within model_dir, such as 'extra'"]


def is_of_run(trainer: Trainer, name: str) -> bool:
    """Return whether a run would resume from a checkpoint of this name."""
    return name_pattern(trainer.checkpoint.checkpoint_name).fullmatch(name) is not None


def check_is_apart(where: str, trainer: Trainer, example: str) -> None:
    """Raise a `ConfigError` if a run would resume from a checkpoint of this name."""
    if is_of_run(trainer, example):
        raise ConfigError(
            f"{where}: a checkpoint named {example!r} would look like one of the run's own "
            f"checkpoints (checkpoint.checkpoint_name: {trainer.checkpoint.checkpoint_name!r}). "
            f"Use another name."
        )


def free_path(path: Path) -> Path:
    """Return an unused path: the given one, or one with a number appended to its name."""
    end = SUFFIX if path.suffix == SUFFIX else ""
    stem = path.name.removesuffix(end)
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{stem}_{number}{end}")
    return free


def state_of(trainer: Trainer, where: str, names: tuple[str, ...] = ("all",)) -> dict[str, Any]:
    """Return the checkpoint content of the current state; shares memory with the run.

    `trainer`: at a step boundary.

    Raises:
        ConfigError: If there is no such part.
    """
    state: dict[str, Any] = {}
    trainer.hooks.on_save_checkpoint(trainer, state)
    trainer.hooks.postprocess_checkpoint(trainer, state)
    return state if "all" in names else parts_of(where, state, names)


def save_state(
    trainer: Trainer, path: Path, state: dict[str, Any], facts: Mapping[str, Any] | None = None
) -> None:
    """Write a state of the current step: sharded, or completely by a single process.

    `path`: unused; the same on all processes.

    Raises:
        CheckpointError: If it cannot be written.
    """
    step, group = trainer.global_step, trainer.backend.comm.process_group
    if group is None:
        checkpointing.save(path, trainer.backend.writable(state), step=step, facts=facts)
    else:
        part = part_of(state, trainer)
        checkpointing.save_sharded(path, part, step=step, facts=facts, process_group=group)
    trainer.summary.note_checkpoint(path)


def try_to_write(write: Callable[[], object], what: str) -> bool:
    """Return whether something was written; a disk error is logged.

    Raises:
        CheckpointError: If it failed for another reason.
    """
    try:
        write()
    except CheckpointError as error:
        if not is_refusal_of_disk(error):
            raise
        log.error("%s: %s", what, error)
        return False
    return True


def remove(path: Path) -> None:
    """Delete a checkpoint if it exists. A failure is logged."""
    if not os.path.lexists(path):
        return
    try:
        checkpointing.delete(path)
    except (CheckpointError, OSError) as error:
        log.warning("Cannot delete checkpoint %s: %s", path, error)
    else:
        log.debug("Deleted checkpoint %s.", path)


def check_is_directory(where: str, template: str) -> None:
    """Raise a `ConfigError` if a checkpoint name has the suffix of weights files."""
    if template.endswith(SUFFIX):
        raise ConfigError(
            f"{where} is {template!r}; a checkpoint is a directory. Remove {SUFFIX}, the "
            f"suffix of weights files."
        )


class SideCheckpoints:
    """Write additional checkpoints of a callback, apart from the run's own.

    A disk error is logged; the run continues.

    `folder`: within `model_dir`. `averaged`: write the averaged weights of `ModelEma` instead of
    the model's.
    """

    def __init__(
        self, owner: str, folder: str, states: tuple[str, ...] = ("all",), *, averaged: bool = False
    ) -> None:
        self._owner = owner
        self._folder = folder
        self._states = states
        self._averaged = averaged

    def root(self, trainer: Trainer) -> Path:
        """Return the folder."""
        return trainer.model_dir / self._folder

    def check_is_apart(self, where: str, trainer: Trainer, template: str) -> None:
        """Raise a `ConfigError` if a run would resume from what is written.

        `template`: its name, with the field `{step}`.
        """
        example = self.root(trainer) / template.format(step=0)
        if trainer.checkpoint.is_in_folder(trainer, example):
            check_is_apart(where, trainer, example.name)

    def prepare(self, trainer: Trainer) -> None:
        """Check that the folder is writable before the run starts.

        Raises:
            ConfigError: If it is not.
        """
        if trainer.backend.comm.is_main and trainer.backend.caps.holds_values:
            root = self.root(trainer)
            try:
                checkpointing.probe(root)
            except CheckpointError as error:
                raise ConfigError(f"{self._owner}.folder: {error}") from None
            checkpointing.clean(root)

    def write(self, trainer: Trainer, name: str, *, replaces: bool = False) -> str | None:
        """Write the current state.

        `trainer`: at a step boundary. `name`: a weights file if it ends in .safetensors, else a
        checkpoint. `replaces`: replace an existing one, which this run wrote before it was resumed;
        otherwise another name is used.

        Returns:
            The name used; None = disk error.
        """
        if not trainer.backend.caps.holds_values:
            return None
        trainer.drain()
        trainer.checkpoint.finish(trainer)  # its collectives must not interleave with these
        if trainer.backend.comm.is_main:
            name = self._make_room(trainer, name, replaces=replaces)
        name = trainer.backend.comm.broadcast_object(name)
        path = self.root(trainer) / name
        with saving(trainer), self._weights(trainer):
            if not try_to_write(partial(self._write, trainer, path), f"Failed to write {path}"):
                return None
        log.info("Saved %s.", shown_path(path))
        return name

    def delete(self, trainer: Trainer, names: Iterable[str]) -> None:
        """Delete what was written under these names."""
        if not trainer.backend.comm.is_main:
            return
        for name in names:
            path = self.root(trainer) / name
            if not name.endswith(SUFFIX):
                remove(path)
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("Cannot delete %s: %s", path, error)

    def _weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return the context in which the model has the weights to write."""
        if not self._averaged:
            return nullcontext()
        ema = trainer.get_callback(ModelEma)
        return nullcontext() if ema is None or not ema.has_average else ema.swap()

    def _make_room(self, trainer: Trainer, name: str, *, replaces: bool) -> str:
        """Return a name that is unused now."""
        path = self.root(trainer) / name
        if replaces and os.path.lexists(path):
            self.delete(trainer, [name])
        return free_path(path).name

    def _write(self, trainer: Trainer, path: Path) -> None:
        backend = trainer.backend
        if path.suffix != SUFFIX:
            save_state(trainer, path, self._state(trainer, self._states))
            return
        if not backend.caps.sharded_state:
            model = backend.writable(self._state(trainer, ("model",))["model"])
            write_in_main(trainer, partial(checkpointing.write_weights, model, path))
            return
        # Via a checkpoint, which several processes can write; one process writes the file.
        folder = path.with_name(backend.comm.broadcast_object(hidden_name("tmp", path.stem)))
        save_state(trainer, folder, self._state(trainer, ("model",)))
        try:
            write_in_main(trainer, partial(checkpointing.export, folder, path))
        finally:
            if backend.comm.is_main:
                checkpointing.delete(folder)

    def _state(self, trainer: Trainer, states: tuple[str, ...]) -> dict[str, Any]:
        return state_of(trainer, f"{self._owner}.checkpoint_states", states)


def write_in_main(trainer: Trainer, write: Callable[[], object]) -> None:
    """Write something in the main process; a failure is raised in all processes."""
    failure = _failure_of(write) if trainer.backend.comm.is_main else None
    failure = trainer.backend.comm.broadcast_object(failure)
    if failure is not None:
        message, is_refusal = failure
        raise DiskError(message) if is_refusal else CheckpointError(message)


def _failure_of(write: Callable[[], object]) -> tuple[str, bool] | None:
    """Write something; return the error message, if any, and whether it is a disk error."""
    try:
        write()
    except CheckpointError as error:
        return str(error), is_refusal_of_disk(error)
    return None
