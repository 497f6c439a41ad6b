"""Which attention kernels of torch a device has."""

from __future__ import annotations

import torch


def has_fused_dropout(device: torch.device) -> bool:
    """Return whether the fused attention kernels of a device drop weights themselves.

    Elsewhere torch materializes the weights of all pairs of positions.
    """
    return device.type == "cuda"


def has_trained_flex_attention(device: torch.device) -> bool:
    """Return whether `flex_attention` has a backward pass on a device."""
    return device.type == "cuda"
