"""Plans: patterns of module names, and how each module that they match is parallelized."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch.nn import Module

from ..errors import BackendError, suggest

Kinds = tuple[type[Module], ...]


def starred(name: str) -> str:
    """Return the pattern of a module name and of the same module in other layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def resolve_plan(
    model: Module, plan: Mapping[str, str], option: str, kinds_of: Callable[[str], Kinds]
) -> dict[str, str]:
    """Return the style of each module in the plan, by name.

    Args:
        model: The model.
        plan: Patterns of module names, as in `fnmatch`, to styles.
        option: Where the plan is from, for messages.
        kinds_of: Returns the classes of modules that a style is for.

    Raises:
        BackendError: If a pattern matches no module, or patterns with different styles match one.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        kinds = kinds_of(style)
        names = [name for name, module in modules.items() if isinstance(module, kinds)]
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            known = set(map(starred, names))
            raise BackendError(
                f"{option}[{pattern!r}] ({style}) matches no "
                f"{' or '.join(kind.__name__ for kind in kinds)} of {type(model).__name__}. "
                f"{suggest(pattern, known)}"
            )
        for name in matching:
            other, other_style = found.setdefault(name, (pattern, style))
            if other_style != style:
                raise BackendError(
                    f"{option}: {name} matches {other!r} ({other_style}) and "
                    f"{pattern!r} ({style}). Only one pattern may match it."
                )
    return {name: style for name, (_, style) in found.items()}
