"""Initial values of a model that was built without values."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

from .placement import has_no_values

if TYPE_CHECKING:
    from .deferred_init import Initialization


class InitialValues:
    """Draws the values of a model where they belong, unless a checkpoint will replace them."""

    def __init__(self) -> None:
        self.loaded: Collection[str] = ()
        """Names of parameters and buffers that are loaded before anything reads them: not drawn."""
        self.can_wait = True
        """Whether a model may be built without values."""
        self._done: Initialization | None = None

    @property
    def num_drawn(self) -> int | None:
        """How many numbers of parameters this rank has initialized; None = a model with values."""
        return None if self._done is None else self._done.num_drawn

    def left_out(self) -> AbstractContextManager[object]:
        """Return the context in which a model is built without values, to get them by `draw`.

        Its modules have `reset_parameters` or `reset_steps`, see `deferred_init.materialize`.
        """
        return torch.device("meta") if self.can_wait else nullcontext()

    def draw(self, model: Module, device: torch.device) -> None:
        """Allocate and initialize a model, if it has no values. Collective.

        Raises:
            BackendError: If nothing initializes a parameter or buffer.
        """
        if has_no_values(model):
            from .deferred_init import materialize  # imports torch.distributed

            self._done = materialize(model, device, self.loaded)

    def note_loaded(self, names: Collection[str]) -> None:
        """Note that parameters and buffers were loaded. The same on all ranks."""
        if self._done is not None:
            self._done.note_loaded(names)

    def draw_rest(self, names: Collection[str] | None = None) -> None:
        """Initialize what was to be loaded and was not. Collective.

        Args:
            names: Of these parameters and buffers; None = of all. The same on all ranks.
        """
        if self._done is not None:
            self._done.finish(names)
