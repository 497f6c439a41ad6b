"""The name scopes of validation dataloaders."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from modelzoo_trainer.callback import Loader


class ValidationScopes:
    """The numbers of validation dataloaders, for the names of their metrics."""

    def __init__(self) -> None:
        self._loaders: list[Callable[[], Loader]] = []  # while they are referenced

    def number(self, val_dataloaders: list[Loader]) -> list[Loader]:
        """Number dataloaders in this order, and return them."""
        self._loaders = [_reference(loader) for loader in val_dataloaders]
        return val_dataloaders

    def scope_of(self, val_dataloader: Loader) -> str:
        """Return the name scope of a dataloader, numbered when first seen.

        The number of a deleted one is reused.
        """
        found = [known() for known in self._loaders]
        for wanted in (val_dataloader, None):
            for number, known in enumerate(found):
                if known is wanted:
                    self._loaders[number] = _reference(val_dataloader)
                    return f"validate_{number}"
        self._loaders.append(_reference(val_dataloader))
        return f"validate_{len(found)}"


def _reference(loader: Loader) -> Callable[[], Loader]:
    """Return a weak reference, or a strong one if the type does not support it."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader
