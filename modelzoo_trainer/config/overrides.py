"""Overrides from the command line: `--set init.loop.max_steps=10`, `--max_steps 10`."""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, replace
from typing import Final

from modelzoo_trainer.base.secrets import hide_in_command
from modelzoo_trainer.config.loader import MAX_DEPTH, read_value
from modelzoo_trainer.config.modes import MODES
from modelzoo_trainer.config.plan import METHODS
from modelzoo_trainer.config.positions import (
    Entry,
    FilePosition,
    Mapping,
    Node,
    Problems,
    Scalar,
    Sequence,
    describe,
    is_null,
)
from modelzoo_trainer.errors import ConfigError

_STEP: Final = re.compile(
    r'\.?(?:\[(?P<item>[^\[\]"=]+)\]|"(?P<quoted>[^"]*)"|(?P<key>[^.\[\]"=\s]+))'
)
_FORM: Final = "Write --set a.b.c=VALUE, with items of a list as [0] or [ClassName]"


@dataclass(frozen=True, slots=True)
class Item:
    """A step of a path into a list: an index, or the class name of a component."""

    name: str


@dataclass(frozen=True, slots=True)
class Override:
    """A value and the path at which it is set."""

    # from the root of the file; a text is a key, an `Item` leads into a list
    steps: tuple[str | Item, ...]
    node: Node
    at: FilePosition  # the option, for messages
    only_present: bool = False  # whether a missing path is ignored instead of created


def parse_override(text: str) -> Override:
    """Parse the value of `--set`.

    `text`: `PATH=VALUE`, the value in YAML's syntax. A path that does not start with `trainer`
    is relative to it.

    Raises:
        ConfigError: If it is not of that form.
    """
    source = " ".join(hide_in_command(["--set", text]))
    problems = Problems()
    at = FilePosition(source)
    steps: list[str | Item] = []
    end = 0
    while match := _STEP.match(text, end):
        steps.append(_step(match))
        end = match.end()
    if not steps or not text.startswith("=", end):
        problems.add(at, "", f"is not of the form PATH=VALUE. {_FORM}.")
    elif len(steps) > MAX_DEPTH:
        problems.add(at, "", f"has a path of {len(steps)} keys; the maximum is {MAX_DEPTH}.")
    problems.raise_if_any()
    if steps[0] != "trainer":
        steps.insert(0, "trainer")
    return Override(tuple(steps), read_value(text[end + 1 :], source), at)


def _step(match: re.Match[str]) -> str | Item:
    if match["item"] is not None:
        return Item(match["item"].strip())
    return match["quoted"] if match["quoted"] is not None else match["key"]


def apply_overrides(root: Node, overrides: list[Override]) -> Node:
    """Return a copy of `root` with values set; missing parts of a path are created.

    In a file with a list of trainers, a path that names none of them is set in all.

    Raises:
        ConfigError: If a path goes through something that is not a mapping or list, or to a
            missing item; all problems together.
    """
    problems = Problems()
    for override in overrides:
        try:
            root = _set(root, override.steps, override, "")
        except ConfigError as error:
            problems.add(override.at, "", str(error))
    problems.raise_if_any()
    return root


def _set(node: Node | None, steps: tuple[str | Item, ...], override: Override, path: str) -> Node:
    if not steps:
        return override.node
    step, rest = _first(node, steps)
    if isinstance(step, Item):
        return _set_item(node, step, rest, override, path)
    if path == "trainer" and isinstance(node, Sequence):
        inner = steps if step == "trainer" else ("trainer", *steps)
        items = (_set(item, inner, override, f"{path}[{i}]") for i, item in enumerate(node.items))
        return replace(node, items=tuple(items))
    if is_null(node):
        node = Mapping({}, override.at)
    if override.only_present and (not isinstance(node, Mapping) or step not in node.entries):
        assert node is not None  # it would be null
        return node
    if not isinstance(node, Mapping):
        assert node is not None  # it would be null
        hint = " Select an item, as in [0]." if isinstance(node, Sequence) else ""
        raise ConfigError(f"{path} is {describe(node)} and has no key {step!r}.{hint}")
    value = _set(node.get(step), rest, override, f"{path}.{step}" if path else step)
    key_at = override.at if not rest or step not in node.entries else node.entries[step].key_at
    return replace(node, entries={**node.entries, step: Entry(key_at, value)})


def _first(
    node: Node | None, steps: tuple[str | Item, ...]
) -> tuple[str | Item, tuple[str | Item, ...]]:
    """Return the first step and the others.

    Several keys are one step if they are a key with dots, such as `torch.optim.SGD`.
    """
    there = node.entries if isinstance(node, Mapping) else {}
    for num in range(2, len(steps) + 1) if steps[0] not in there else ():
        keys = [step for step in steps[:num] if isinstance(step, str)]
        joined = ".".join(keys)
        if len(keys) == num and joined in there:
            return joined, steps[num:]
    return steps[0], steps[1:]


def _set_item(
    node: Node | None, step: Item, rest: tuple[str | Item, ...], override: Override, path: str
) -> Node:
    if is_null(node):
        node = Sequence((), override.at)
    if not isinstance(node, Sequence):
        assert node is not None  # it would be null
        raise ConfigError(f"{path} is {describe(node)}, not a list, so it has no items.")
    items = list(node.items)
    place = f"{path}[{step.name}]"
    if step.name.lstrip("-").isdigit():
        idx = int(step.name)
        if not 0 <= idx < len(items):
            num = "1 item" if len(items) == 1 else f"{len(items)} items"
            raise ConfigError(f"{place} does not exist; the list has {num}.")
        if path == "trainer" and rest and rest[0] != "trainer":
            rest = ("trainer", *rest)
        items[idx] = _set(items[idx], rest, override, place)
        return replace(node, items=tuple(items))
    named = [idx for idx, item in enumerate(items) if _class_name(item) == step.name.lower()]
    if len(named) > 1:
        raise ConfigError(
            f"{place} is ambiguous: items {named} have that name; select one by its index."
        )
    if not named:
        value = _set(None, rest, override, place)
        items.append(Mapping({step.name: Entry(override.at, value)}, override.at))
        return replace(node, items=tuple(items))
    component = items[named[0]]
    assert isinstance(component, Mapping)  # it has a class name
    ((name, entry),) = component.entries.items()
    value = _set(entry.node, rest, override, place)
    key_at = entry.key_at if rest else override.at
    items[named[0]] = replace(component, entries={name: Entry(key_at, value)})
    return replace(node, items=tuple(items))


def _class_name(item: Node) -> str | None:
    if isinstance(item, Mapping) and len(item.entries) == 1:
        return str(next(iter(item.entries))).lower()
    return None


def set_option(
    steps: tuple[str | Item, ...], value: str | None, option: str, *, only_present: bool = False
) -> Override:
    """Return the override that an option such as `--device` stands for."""
    at = FilePosition(option if value is None else f"{option} {value}")
    return Override(steps, Scalar(value, at), at, only_present)


_INIT: Final = ("trainer", "init")
_LENGTHS: Final = ("num_steps", "max_steps", "num_epochs")
_TEXTS: Final = (
    "device",
    "model_dir",
    "progress",
    "load_checkpoint_states",
)  # others are read as YAML
_SWITCH: Final = "disable_strict_checkpoint_loading"
_SECTIONS: Final[MappingOf[str, tuple[str | Item, ...]]] = {
    **dict.fromkeys((*_LENGTHS, "eval_steps"), ("loop",)),
    "load_checkpoint_states": ("callbacks", Item("LoadCheckpointStates")),
    _SWITCH: ("checkpoint",),
}
"""The section of `init` that has an option's key, if it is not a key of `init` itself."""


def changes_of(given: MappingOf[str, str | None], mode: str | None, root: Node) -> list[Override]:
    """Return the overrides that options stand for.

    `given`: their values as text by name; None = not given. `mode`: what runs; None = each section
    of the file. `root`: the file; its layout decides where a checkpoint's path is set.

    Raises:
        ConfigError: If a value is not YAML, or a path could be meant for several trainers.
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
            changes.append(_change(name, value, mode))
    if "device" in values:
        changes.append(_null(("backend", "backend_type"), "device"))
    return changes


def _checkpoint(path: str, mode: str | None, root: Node) -> list[Override]:
    trainer = root.get("trainer") if isinstance(root, Mapping) else None
    if isinstance(trainer, Sequence) and len(trainer.items) > 1:
        section = "fit" if mode is None else MODES[mode]
        raise ConfigError(
            f"--checkpoint_path {path}: the file has {len(trainer.items)} trainers. Set the path "
            f"for one of them: --set trainer[0].{section}.{METHODS[section].ckpt}={path}."
        )
    if isinstance(trainer, Sequence) and trainer.items:
        (item,) = trainer.items
        trainer = item.get("trainer") if isinstance(item, Mapping) else None
    there = trainer.entries if isinstance(trainer, Mapping) else {}
    sections = [key for key in MODES.values() if key in there] if mode is None else [MODES[mode]]
    return [
        set_option(
            ("trainer", section, METHODS[section].ckpt),
            path,
            "--checkpoint_path",
        )
        for section in dict.fromkeys(sections)
    ]


def _change(name: str, value: str, mode: str | None) -> Override:
    if name == "logging":
        return set_option((*_INIT, "logging", "log_level"), value.upper(), "--logging")
    steps = (*_INIT, *_SECTIONS.get(name, ()), name)
    if mode is not None and name in METHODS[MODES[mode]].plain:
        steps = ("trainer", MODES[mode], name)
    if name in _TEXTS:
        return set_option(steps, value, f"--{name}")
    source = f"--{name}" if name == _SWITCH else f"--{name} {value}"
    node = read_value(value, source)
    if is_null(node):
        raise ConfigError(f"{source}: requires a number.")
    return Override(steps, node, FilePosition(source))


def _null(steps: tuple[str, ...], name: str) -> Override:
    return set_option((*_INIT, *steps), None, f"--{name}", only_present=True)
