"""The last losses, and what is a spike after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

# Of a normal distribution, the standard deviation over the median absolute deviation.
_TO_SIGMA: Final = 1.4826


class LossWindow:
    """The losses of the last good steps, on the device: nothing here is read on the host.

    Median and median absolute deviation say what is usual, as outliers do not move them (Leys et
    al. 2013, Detecting outliers, J. Exp. Soc. Psychol. 49(4), 764-766).

    Args:
        size: How many losses, > 0.
        threshold: Robust standard deviations above the median from which on a loss is a spike.
        device: Where they are.
        dtype: Their type.

    State: `losses`, the oldest first; NaN where there is none yet.
    """

    def __init__(
        self, size: int, threshold: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._threshold = threshold
        self._middle = (size - 1) // 2
        self._losses = torch.full((size,), torch.nan, device=device, dtype=dtype)

    def limit(self) -> Tensor:
        """Return the largest loss that is no spike.

        Returns:
            (); infinite until the window is full, and while most losses of it are the same.
        """
        losses = self._losses
        median = self._median(losses)
        sigma = self._median((losses - median).abs()) * _TO_SIGMA
        limit = median + self._threshold * sigma
        # The oldest is NaN until the window is full.
        is_known = (losses[0] == losses[0]) & (sigma > 0)
        return torch.where(is_known, limit, torch.inf)

    def _median(self, values: Tensor) -> Tensor:
        return values.sort().values[self._middle]

    def add(self, loss: Tensor, bad: Tensor) -> None:
        """Take a loss in, unless it is that of a bad step.

        Args:
            loss: (), of the window's type.
            bad: (), bool.
        """
        moved = torch.cat((self._losses[1:], loss.reshape(1)))
        self._losses = torch.where(bad, self._losses, moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses."""
        return {"losses": self._losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; of a window of another size the newest."""
        found = state["losses"].to(self._losses)
        size = len(self._losses)
        filler = torch.full_like(self._losses, torch.nan)
        self._losses = torch.cat((filler, found))[-size:]
