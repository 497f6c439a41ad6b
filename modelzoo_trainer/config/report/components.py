"""What a trainer is made of: each class with the arguments that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.names import Unshipped
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.report.values import argument_lines, defaults_of, packed

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
    "callbacks",
    "loggers",
)
_NUM_INJECTED: Final = {"optimizer": 1, "schedulers": 1}  # parameters that the program gives


def component_lines(plan: TrainerPlan) -> list[str]:
    """Return lines on the components of a plan.

    Args:
        plan: The core components that the file says nothing of are left out.
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
    """Return the name of a class, with its module if it is one of the user's.

    Args:
        target: A class, a function, or one that this package does not have.
    """
    name = getattr(target, "__name__", type(target).__name__)
    if isinstance(target, Unshipped):
        return f"{name} (not part of this package)"
    module = str(target.__module__)
    return name if module.startswith("modelzoo_trainer.") else f"{name} (of {module})"


def _labelled(label: str, value: Any) -> Iterator[tuple[str, Component]]:
    """Yield a component, or those of a list, each with what it is called."""
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
        *argument_lines(defaults_of(component, num_injected), deeper, "defaults: "),
    ]
