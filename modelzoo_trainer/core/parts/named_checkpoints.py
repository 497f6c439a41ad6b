"""The checkpoints that `ckpt_path` names: the last one, and the best one."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.checkpointing.folder import refuse_newer
from modelzoo_trainer.checkpointing.stores.urls import is_url
from modelzoo_trainer.errors import CheckpointError, ConfigError, NewerFormat, NoCheckpoint

if TYPE_CHECKING:
    from modelzoo_trainer.core.model import ModelCallback
    from modelzoo_trainer.trainer import Trainer

LAST: Final = "last"
BEST: Final = "best"
NAMES: Final = (BEST, LAST)
"""The values of `ckpt_path` that are not paths; `./best` is one."""
FACT: Final = "save_best"
"""The entry of a manifest that marks a checkpoint of `SaveBest`."""
_MOST: Final = 10  # checkpoints in a message

log = logging.getLogger("modelzoo_trainer.checkpoint")


@dataclass(frozen=True, slots=True)
class _Marked:
    """A checkpoint that a `SaveBest` has written."""

    path: Path
    metric: str
    value: float
    mode: str | None  # None = written by an earlier version


def paths_of(trainer: Trainer, ckpt_paths: Any) -> list[Any]:
    """Return the checkpoints of one or several paths, globs, or names such as "best". Collective.

    Raises:
        CheckpointError: If there is none of that name.
        ConfigError: If a glob matches nothing, or the best one is ambiguous.
    """
    if ckpt_paths is None or ckpt_paths is ...:
        return [ckpt_paths]
    given = [ckpt_paths] if isinstance(ckpt_paths, (str, Path)) else list(ckpt_paths)
    found: list[Any] = []
    for path in given:
        is_name = isinstance(path, str) and path in NAMES
        if is_name:
            found.append(trainer.checkpoint.choose(trainer, path))
        elif is_url(path):
            found.append(trainer.object_store.checkpoint_at(path))
        else:
            found += _matching(Path(path))
    shared: list[Any] = trainer.object_store.shared(trainer, found)
    return shared


def _matching(path: Path) -> list[Path]:
    found = sorted(path.parent.glob(path.name), key=_by_number)
    if not found:
        raise ConfigError(f"ckpt_paths: {str(path)!r} matches no checkpoint.")
    return found


def _by_number(path: Path) -> list[int | str]:
    """Sort key that puts checkpoint_20 before checkpoint_100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def best_in(trainer: Trainer, root: Path) -> Path:
    """Return the best checkpoint of a folder, by the metric of the trainer's first `SaveBest`.

    Without a `SaveBest`, all best checkpoints of the folder must have the same metric.

    Raises:
        CheckpointError: If there is none.
        ConfigError: If it is ambiguous.
    """
    found = _marked_in(root)
    watched = {one.metric: one.mode for one in _watching(trainer)}
    metrics = sorted({one.metric for one in found})
    metric = next((name for name in watched if name in metrics or not found), None)
    if not found:
        raise NoCheckpoint(_explain_none(root, metric))
    if metric is None and len(metrics) > 1:
        raise ConfigError(
            f"ckpt_path: 'best' is ambiguous: {str(root)!r} has best checkpoints by several "
            f"metrics, {', '.join(map(repr, metrics))} "
            f"({', '.join(one.path.name for one in found)}). Pass a path, or add "
            f"SaveBest(metric=...) to the callbacks."
        )
    metric = metric or metrics[0]
    fitting = [one for one in found if one.metric == metric]
    modes = {one.mode or watched.get(metric) for one in fitting}
    if len(fitting) > 1 and (len(modes) > 1 or None in modes):
        is_known = None not in modes
        problem = "differ in mode" if is_known else "do not all record the mode"
        advice = "" if is_known else ", or add SaveBest(metric=..., mode=...) to the callbacks"
        raise ConfigError(
            f"ckpt_path: 'best' is ambiguous: the best checkpoints by {metric!r} in {str(root)!r} "
            f"{problem} ('min' or 'max'): {', '.join(one.path.name for one in fitting)}. Pass a "
            f"path{advice}."
        )
    sign = -1.0 if modes == {"max"} else 1.0
    return min(fitting, key=lambda one: sign * one.value).path


def note_best(trainer: Trainer, used: Path) -> None:
    """Log that a validation uses the newest checkpoint although there is a best one."""
    if not any(getattr(one, "load_best", False) for one in trainer.all_callbacks):
        return
    try:
        best = best_in(trainer, trainer.checkpoint.root(trainer))
    except (ConfigError, NewerFormat):
        return
    log.info(
        "Using %s, the newest checkpoint. The best one is %s: to use it, pass ckpt_path='best' "
        "(--checkpoint_path best).",
        shown_path(used),
        best.name,
    )


def note_untrained(trainer: Trainer, noted: int) -> int:
    """Log that a validation or `predict` uses the weights that the model was created with.

    It is a warning unless the program passed a model object, whose weights it may have loaded, and
    either there is no optimizer or it only validates.

    `noted`: the level at which it was logged before; 0 = it was not. Nothing is logged again unless
    the level is higher.

    Returns:
        The highest level at which it was logged.
    """
    has_weights = next(trainer.model.parameters(), None) is not None
    if not has_weights or not trainer.backend.caps.holds_values:
        return noted
    model: ModelCallback = trainer.callbacks["model"]
    is_to_train = trainer.has_optimizer and trainer.predicting.is_active
    level = logging.WARNING if is_to_train or not model.was_object else logging.INFO
    if level <= noted:
        return noted
    checkpoint = trainer.checkpoint
    root = checkpoint.root(trainer)
    why = f"there is no checkpoint in {shown_path(root)}"
    if not checkpoint.autoload_last_checkpoint:
        why = "checkpoint.autoload_last_checkpoint is false"
    elif checkpointing.list_checkpoints(root):
        why = f"no checkpoint in {shown_path(root)} is named like {checkpoint.checkpoint_name!r}"
    log.log(
        level,
        "No checkpoint was loaded into %s: %s. It is untrained, unless your program has trained it "
        "or loaded weights. Call fit first, or pass ckpt_path (None = the weights as they are, "
        "without this message).",
        type(trainer.model).__name__,
        why,
    )
    return level


def _watching(trainer: Trainer) -> list[Any]:
    return [one for one in trainer.all_callbacks if hasattr(type(one), "best_path")]


def _marked_in(root: Path) -> list[_Marked]:
    for path in checkpointing.candidates(root, re.compile(".+")):
        refuse_newer(path)  # it may be the best one
    found = []
    for info in checkpointing.list_checkpoints(root):
        facts = checkpointing.read_manifest(info.path).facts
        if FACT in facts:
            one = _Marked(info.path, facts["metric"], facts["value"], facts.get("mode"))
            found.append(one)
    return found


def _explain_none(root: Path, metric: str | None) -> str:
    if not checkpointing.list_checkpoints(root):
        return f"ckpt_path: 'best': {none_in(root)}"
    by = "" if metric is None else f" by {metric!r}"
    return (
        f"ckpt_path: 'best': there is no best checkpoint{by} in {str(root)!r}. Other "
        f"checkpoints there: {_names_in(root)}. Pass a path; to save best checkpoints, train with "
        f"the callback SaveBest."
    )


def none_in(folder: Path) -> str:
    """Say that a folder has no checkpoints."""
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}. Check the path."
    return f"there is no checkpoint in {str(folder)!r}. Is it the right folder?"


def listed(folder: Path) -> str:
    """Return a sentence on the checkpoints of a folder."""
    try:
        names = _names_in(folder)
    except CheckpointError as error:
        return str(error)
    if names:
        return f"Checkpoints in {str(folder)!r}: {names}."
    text = none_in(folder)
    return text[0].upper() + text[1:]


def _names_in(folder: Path) -> str:
    names = [info.path.name for info in checkpointing.list_checkpoints(folder)]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[-_MOST:]) + more
