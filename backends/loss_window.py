"""Weights and losses of the batches between two optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossWindow:
    """What the batches of a window count, and their losses; for one process.

    A window is the batches between two optimizer steps. Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self._weights: list[Any] = []
        self._losses: list[Tensor] = []

    def add(self, weight: Any, loss: Tensor | None = None) -> None:
        """Note what a batch counts in the window; before its backward pass.

        Args:
            weight: In a unit that all processes have.
            loss: Its loss, (), if the window's mean is wanted.
        """
        self._weights.append(weight)
        if loss is not None:
            self._losses.append(weighted_loss(loss, weight))

    def sums(self) -> tuple[Any, Any]:
        """Return the sums of weights and weighted losses, averaged over processes.

        Called after the window's last backward pass; collective, unless the gradients' reduction
        has brought them along. If there is no loss, the second is 0.
        """
        return sum(self._weights), sum(self._losses)

    def reset(self) -> None:
        """Forget the window: it is over, or will not be completed."""
        self._weights.clear()
        self._losses.clear()


def weighted_loss(loss: Tensor, weight: Any) -> Tensor:
    """Return a loss times its weight, (); 0 without weight, as the mean of nothing may be NaN."""
    product = loss.detach().reshape(()) * weight
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(product), product)
    return product if weight else torch.zeros_like(product)
