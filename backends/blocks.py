"""The repeated parts of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch.nn import Module, ModuleDict, ModuleList

from .errors import BackendError
from .suggestions import suggest


def find_blocks(model: Module, names: Collection[str] | None, option: str) -> list[Module]:
    """Return the blocks of a model, each once, those inside others before them.

    Args:
        model: The whole model, which is none of its blocks.
        names: Names of their classes; None = the elements of every `ModuleList` that is not
            itself inside such an element.
        option: Where the names were given; messages start with it.

    Raises:
        BackendError: If no module is of a class that was named.
    """
    if names is None:
        return list(dict.fromkeys(_elements(model)))
    parts = [module for module in model.modules() if module is not model]
    classes = {type(module).__name__ for module in parts}
    for name in names:
        if name not in classes:
            raise BackendError(
                f"{option}: no module of {type(model).__name__} is a {name!r}. "
                f"{suggest(name, classes)}"
            )
    return [module for module in reversed(parts) if type(module).__name__ in names]


def _elements(owner: Module, *, in_list: bool = False) -> Iterator[Module]:
    for child in owner.children():
        if isinstance(child, (ModuleList, ModuleDict)):  # has no forward pass of its own
            yield from _elements(child, in_list=in_list or isinstance(child, ModuleList))
        elif in_list:
            yield child
        else:
            yield from _elements(child)
