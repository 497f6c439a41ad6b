"""From options of the command line, such as `--max_steps`, to changes of the file."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as MappingOf
from typing import Final

from modelzoo_trainer.config.loader import read_value
from modelzoo_trainer.config.overrides import Item, Override, set_option
from modelzoo_trainer.config.plan import MODES
from modelzoo_trainer.config.positions import Mapping, Node, Position, Sequence, is_null
from modelzoo_trainer.errors import ConfigError

_INIT: Final = ("trainer", "init")
_LENGTHS: Final = ("num_steps", "max_steps", "num_epochs")


def changes_of(given: MappingOf[str, str | None], mode: str | None, root: Node) -> list[Override]:
    """Return the changes that options stand for.

    Args:
        given: Their values as text by name; options that were not given are None.
        mode: What runs; None = each section of the file.
        root: The file; its layout decides where a checkpoint's path goes.

    Raises:
        ConfigError: If a value cannot be read, or a path could go to several trainers.
    """
    values = {name: value for name, value in given.items() if value is not None}
    changes: list[Override] = []
    lengths = [name for name in _LENGTHS if name in values]
    if lengths:
        others = [name for name in _LENGTHS if name not in values]
        changes += [_null(("loop", other), lengths[0]) for other in others]
    for name, value in values.items():
        if name == "checkpoint_path":
            changes += _checkpoint(value, mode, root)
        else:
            changes.append(_CHANGES[name](name, value))
    if "device" in values:
        changes.append(_null(("backend", "backend_type"), "device"))
    return changes


def _checkpoint(path: str, mode: str | None, root: Node) -> list[Override]:
    trainer = root.get("trainer") if isinstance(root, Mapping) else None
    if isinstance(trainer, Sequence) and len(trainer.items) > 1:
        raise ConfigError(
            f"--checkpoint_path {path}: the file has {len(trainer.items)} trainers. Say which one "
            f"starts from it: --set trainer[0].fit.ckpt_path={path}."
        )
    if isinstance(trainer, Sequence) and trainer.items:
        (item,) = trainer.items
        trainer = item.get("trainer") if isinstance(item, Mapping) else None
    there = trainer.entries if isinstance(trainer, Mapping) else {}
    sections = [key for key in MODES.values() if key in there] if mode is None else [MODES[mode]]
    return [
        set_option(
            ("trainer", section, "ckpt_paths" if section == "validate_all" else "ckpt_path"),
            path,
            "--checkpoint_path",
        )
        for section in dict.fromkeys(sections)
    ]


def _text(name: str, value: str) -> Override:
    return set_option((*_INIT, name), value, f"--{name}")


def _of_loop(name: str, value: str) -> Override:
    source = f"--{name} {value}"
    if is_null(read_value(value, source)):
        raise ConfigError(f"{source}: has no number. Leave it out, or give one.")
    return Override((*_INIT, "loop", name), read_value(value, source), Position(source))


def _log_level(name: str, value: str) -> Override:
    return set_option((*_INIT, "logging", "log_level"), value.upper(), f"--{name}")


def _not_strict(name: str, value: str) -> Override:
    source = f"--{name}"
    return Override((*_INIT, "checkpoint", name), read_value(value, source), Position(source))


def _states(name: str, value: str) -> Override:
    steps = (*_INIT, "callbacks", Item("LoadCheckpointStates"), name)
    return set_option(steps, value, f"--{name}")


def _null(steps: tuple[str, ...], name: str) -> Override:
    return set_option((*_INIT, *steps), None, f"--{name}", only_present=True)


_CHANGES: Final[dict[str, Callable[[str, str], Override]]] = {
    "device": _text,
    "model_dir": _text,
    "load_checkpoint_states": _states,
    "max_steps": _of_loop,
    "num_steps": _of_loop,
    "num_epochs": _of_loop,
    "eval_steps": _of_loop,
    "logging": _log_level,
    "disable_strict_checkpoint_loading": _not_strict,
}
