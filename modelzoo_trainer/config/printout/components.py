"""Print the components of a trainer with their arguments."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

from pydantic import BaseModel

from modelzoo_trainer.base.secrets import HIDDEN, hide_in_text, is_secret
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.loader import kind_of
from modelzoo_trainer.config.names import Unshipped
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.core import Checkpoint

WIDTH: Final = 100
LABEL: Final = 15  # characters of the first column of a table, with the colon and a space

_PLAIN_TEXT: Final = re.compile(r"[A-Za-z_./~][\w./~:@%+*{}-]*", re.ASCII)
_MOST_CHARACTERS: Final = 80  # of a text; the middle of a longer one is omitted
_KEPT: Final = (50, 27)  # of its beginning and of its end
_SAVING: Final = ("steps", "minutes", "epochs")  # with any of them, one is written at the end
_MOST_ITEMS: Final = 12  # of a list of values


def defaults_of(component: Component, num_injected: int = 0) -> dict[str, Any]:
    """Return the default arguments that the file does not set.

    `component`: one whose class this package does not have has no known defaults.
    """
    try:
        parameters = list(inspect.signature(component.target).parameters.values())
    except ValueError:  # a class written in C without one
        return {}
    return {
        parameter.name: parameter.default
        for parameter in parameters[num_injected:]
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is not parameter.empty
        and parameter.name not in component.arguments
    }


def _shown_defaults(component: Component, num_injected: int) -> dict[str, Any]:
    """Return the defaults, without `save_final_checkpoint` if another setting implies it."""
    found = defaults_of(component, num_injected)
    if component.target is Checkpoint and any(map(component.arguments.get, _SAVING)):
        found.pop("save_final_checkpoint", None)
    return found


def plain(value: Any, key: object = "") -> Any:
    """Return a value as mappings, lists and scalars, with secrets hidden."""
    if is_secret(key, value):
        return HIDDEN
    if isinstance(value, BaseModel):
        return plain(dict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(name): plain(inner, name) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        value = str(value)
    return hide_in_text(value) if isinstance(value, str) else value


def show(value: Any) -> str:
    """Return a plain value as YAML on one line; long values are shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return f"{{{', '.join(f'{key}: {show(inner)}' for key, inner in value.items())}}}"
        case list():
            shown = [show(inner) for inner in value[:_MOST_ITEMS]]
            rest = len(value) - len(shown)
            return f"[{', '.join(shown + [f'and {rest} more'] * (rest > 0))}]"
        case str():
            return _text(value)
        case int() | float():
            return str(value)
        case _:
            return _text(getattr(value, "__name__", type(value).__name__))


def _text(value: str) -> str:
    if value == HIDDEN:
        return value
    if len(value) > _MOST_CHARACTERS:
        value = f"{value[: _KEPT[0]]}...{value[-_KEPT[1] :]}"
    if _PLAIN_TEXT.fullmatch(value) and kind_of(value) == "str":
        return value
    return json.dumps(value)


def argument_lines(arguments: Mapping[str, Any], indent: int, head: str = "") -> list[str]:
    """Return lines with `name=value`, wrapped; long mappings get lines below."""
    short: list[str] = []
    below: list[str] = []
    for name, value in arguments.items():
        known = plain(value, name)
        text = f"{name}={show(known)}"
        if isinstance(known, dict) and len(text) > WIDTH - indent - len(head):
            below += mapping_lines(name, known, indent)
        else:
            short.append(text)
    return packed(short, indent, head) + below


def mapping_lines(name: str, mapping: dict[str, Any], indent: int) -> list[str]:
    """Return a line for each key of a mapping, in block style."""
    lines = [f"{' ' * indent}{name}:"]
    for key, value in mapping.items():
        text = f"{key}: {show(value)}"
        if isinstance(value, dict) and len(text) > WIDTH - indent - 2:
            lines += mapping_lines(key, value, indent + 2)
        else:
            lines += wrapped(text, indent + 2)
    return lines


def packed(items: Iterable[str], indent: int, head: str = "") -> list[str]:
    """Return lines of items with commas between them; none if there are no items."""
    deeper = indent + len(head)
    texts = list(items)
    texts[:-1] = [f"{text}," for text in texts[:-1]]
    lines: list[str] = []
    for item in texts:
        if lines and len(lines[-1]) + 1 + len(item) <= WIDTH:
            lines[-1] += f" {item}"
        else:
            lines += wrapped(item, deeper)
    if lines:
        lines[0] = f"{' ' * indent}{head}{lines[0][deeper:]}"
    return lines


def row(label: str, text: str) -> list[str]:
    """Return a line of a table of two columns, or several if it is long."""
    return wrapped(f"{label + ':':{LABEL}}{text}", 2, deeper=LABEL)


def wrapped(text: str, indent: int, deeper: int = 2) -> list[str]:
    """Return a text in wrapped lines."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + deeper),
        break_long_words=False,
        break_on_hyphens=False,
    )


_INIT: Final = (
    "model",
    "optimizer",
    "schedulers",
    "precision",
    "sparsity",
    "loop",
    "checkpoint",
    "logging",
    "autorestart",
    "object_store",
    "callbacks",
    "loggers",
)
_NUM_INJECTED: Final = {"optimizer": 1, "schedulers": 1}  # parameters that the file does not set


def component_lines(plan: TrainerPlan) -> list[str]:
    """Return lines on the components of a plan.

    `plan`: core components that the file does not mention are omitted.
    """
    lines: list[str] = []
    for key in _INIT:
        value = plan.init.get(key)
        for label, component in _labelled(key, value):
            lines += _lines(label, component, 2, _NUM_INJECTED.get(key, 0))
        names = [type(default).__name__ for default in plan.defaults.get(key, ())]
        lines += packed(names, 2, f"{key}, by default: ")
    for key, value in plan.call.items():
        for label, component in _labelled(f"{plan.method}.{key}", value):
            lines += _lines(label, component, 2, 0)
    return lines


def class_name(target: Any) -> str:
    """Return the name of a class, with its module if it is not shipped."""
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, Unshipped):
        return f"{name} (not part of this package)"
    module = str(target.__module__)
    return name if module.startswith("modelzoo_trainer.") else f"{name} (of {module})"


def _labelled(label: str, value: Any) -> Iterator[tuple[str, Component]]:
    """Yield a component, or the components of a list, with their labels."""
    if isinstance(value, Component):
        yield label, value
    elif isinstance(value, list):
        for idx, inner in enumerate(value):
            yield from _labelled(f"{label}[{idx}]", inner)


def _lines(label: str, component: Component, indent: int, num_injected: int) -> list[str]:
    """Return the lines of one component, and of those among its arguments."""
    deeper = indent + 4
    values: dict[str, Any] = {}
    inner: list[str] = []
    for name, value in component.arguments.items():
        members = list(_labelled(name, value))
        if not members:
            values[name] = value
        for path, member in members:
            inner += _lines(path, member, deeper, num_injected)
    return [
        f"{' ' * indent}{label}: {class_name(component.target)}",
        *argument_lines(values, deeper),
        *inner,
        *argument_lines(_shown_defaults(component, num_injected), deeper, "defaults: "),
    ]
