"""What keeps the value of a recorded tensor, whatever becomes of the tensor."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

log = logging.getLogger("modelzoo_trainer.backends.xla")


class Snapshot:
    """A tensor's value as it is now, without an operation of the graph for it.

    The value under a tensor does not change: what is done in place gives the tensor another one.
    But the memory of the one before is used again by the graph that does it, so that has to make
    a copy.

    Args:
        tensor: Detached; shares its memory with what is read.
    """

    __slots__ = ("_tensor", "kept")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = None
        if torch._is_functional_tensor(tensor) and not _num_changes(tensor):
            self.kept = torch._from_functional_tensor(tensor)
            self._tensor = tensor
        else:
            self.kept = tensor.clone()  # what was changed in place once will be again

    def forget(self) -> None:
        """Care no more for what becomes of the tensor."""
        self._tensor = None

    def save(self) -> bool:
        """Make the copy if the tensor has been changed; return whether it may be still."""
        if self._tensor is None:
            return False
        if _num_changes(self._tensor):
            if torch._from_functional_tensor(self._tensor) is self.kept:
                log.warning(
                    "A tensor was overwritten (copy_) before its value, which was to be read, had "
                    "left the device: the new value is read. Read a clone of it."
                )
            self.kept = self.kept.clone()
            self._tensor = None
        return self._tensor is not None


def _num_changes(tensor: Tensor) -> int:
    """Return how often a tensor's memory was changed in place, through whichever of its views."""
    # A tensor's own version does not know of what was done to its `.data`.
    num: int = torch._functionalize_mutation_counter(tensor)
    return num
