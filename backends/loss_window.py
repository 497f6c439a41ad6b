"""Weights and losses of batches between two optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossWindow:
    """Weights and losses of the batches of a window; for one process.

    A window is the batches between two optimizer steps. Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self._weights: list[Any] = []
        self._losses: list[Tensor] = []

    def add(self, weight: Any, loss: Tensor | None = None) -> None:
        """Add a batch to the window, before its backward pass.

        Args:
            weight: In a unit shared by all ranks.
            loss: Its loss, (), if the window's mean is needed.
        """
        self._weights.append(weight)
        if loss is not None:
            self._losses.append(weighted_loss(loss, weight))

    def sums(self) -> tuple[Any, Any]:
        """Return the sums of weights and weighted losses, averaged over ranks.

        Call after the window's last backward pass. Collective, unless the gradient reduction has
        included them. Without a loss, the second is 0.
        """
        return sum(self._weights), sum(self._losses)

    def reset(self) -> None:
        """Start a new window."""
        self._weights.clear()
        self._losses.clear()


def weighted_loss(loss: Tensor, weight: Any) -> Tensor:
    """Return a loss times its weight, (); 0 for weight 0, as an empty mean may be NaN."""
    product = loss.detach().reshape(()) * weight
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(product), product)
    return product if weight else torch.zeros_like(product)
