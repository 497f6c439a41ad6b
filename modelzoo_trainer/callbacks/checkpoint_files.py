"""What callbacks around checkpoints share: names, parts, and how one is written and deleted."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.folder import name_pattern
from modelzoo_trainer.core.sharded_state import part_of
from modelzoo_trainer.errors import CheckpointError, ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

FILE_SUFFIX: Final = ".safetensors"


def part_names(where: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of a checkpoint's parts that an argument stands for.

    Args:
        where: The argument, for the message.
        given: A list of names, or a text with commas.

    Raises:
        ConfigError: If no part is named.
    """
    names = given.split(",") if isinstance(given, str) else given
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    found = tuple(name.strip() for name in names) if is_list else ()
    if not found or not all(found):
        raise ConfigError(
            f"{where} is {given!r}; name parts of a checkpoint, such as 'model' or "
            f"'model,optimizer'."
        )
    return found


def parts_of(where: str, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named parts of a state, and those that belong to any: `__*`.

    Args:
        where: The argument that names them, for the message.
        state: A checkpoint's.
        names: The parts.

    Raises:
        ConfigError: If there is no such part.
    """
    for name in names:
        if name not in state:
            raise ConfigError(
                f"{where}: a checkpoint of this run has no part {name!r}. "
                f"{suggest(name, state, cutoff=0.75)}"
            )
    wanted = set(names)
    return {key: part for key, part in state.items() if key in wanted or key.startswith("__")}


def check_name(where: str, template: str, fields: tuple[str, ...]) -> None:
    """Raise a `ConfigError` unless a template is a file name with each field once.

    Args:
        where: The argument, for the message.
        template: What it is.
        fields: The names of the fields.
    """
    try:
        parsed = Formatter().parse(template) if isinstance(template, str) else ()
        found = [tuple(part[1:]) for part in parsed if part[1] is not None]
    except ValueError:
        found = []
    if sorted(found) != sorted((field, "", None) for field in fields) or "/" in template:
        listed = " and ".join(f"{{{field}}}" for field in fields)
        raise ConfigError(f"{where} is {template!r}; it must be a file name with {listed}, once.")


def is_of_run(trainer: Trainer, name: str) -> bool:
    """Return whether a name is one of those that a run looks for to go on from."""
    return name_pattern(trainer.checkpoint.checkpoint_name).fullmatch(name) is not None


def check_is_apart(where: str, trainer: Trainer, example: str) -> None:
    """Raise a `ConfigError` if a run would take what has this name for its own checkpoint.

    Args:
        where: The argument, for the message.
        trainer: Whose run it is.
        example: A name as the argument makes them.
    """
    if is_of_run(trainer, example):
        raise ConfigError(
            f"{where}: {example!r} is a name of the checkpoints that the run itself goes on from "
            f"(checkpoint.checkpoint_name: {trainer.checkpoint.checkpoint_name!r}). Use another."
        )


def free_path(path: Path) -> Path:
    """Return a path that is not in use: the given one, or one with a number behind its name."""
    end = FILE_SUFFIX if path.suffix == FILE_SUFFIX else ""
    stem = path.name.removesuffix(end)
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{stem}_{number}{end}")
    return free


def state_of(trainer: Trainer, where: str, names: tuple[str, ...] = ("all",)) -> dict[str, Any]:
    """Return what a checkpoint of the run as it is now holds; shares memory with the run.

    Args:
        trainer: At a step boundary.
        where: The argument that names the parts, for the message.
        names: The parts, or "all".

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
    """Write a state of the current step: each process what it has, or the only one all of it.

    Args:
        trainer: Whose state it is.
        path: Not in use; the same on all processes.
        state: What `state_of` returned.
        facts: For the manifest.

    Raises:
        CheckpointError: If it cannot be written.
    """
    step, group = trainer.global_step, trainer.backend.process_group
    if group is None:
        checkpointing.save(path, trainer.backend.writable(state), step=step, facts=facts)
    else:
        part = part_of(state, trainer)
        checkpointing.save_sharded(path, part, step=step, facts=facts, process_group=group)


def remove(path: Path) -> None:
    """Delete a checkpoint, if it is there; a failure is logged."""
    if not os.path.lexists(path):
        return
    try:
        checkpointing.delete(path)
    except (CheckpointError, OSError) as error:
        log.warning("Checkpoint %s could not be deleted: %s", path, error)
    else:
        log.info("Deleted checkpoint %s.", path)
