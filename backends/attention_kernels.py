"""Which attention kernels of torch a device has."""

from __future__ import annotations

from typing import Any

import torch


def has_fused_dropout(device: torch.device) -> bool:
    """Return whether the fused attention kernels of a device drop weights themselves.

    Elsewhere torch materializes the weights of all pairs of positions.
    """
    return device.type == "cuda"


def has_trained_flex_attention(device: torch.device) -> bool:
    """Return whether `flex_attention` has a backward pass on a device."""
    return device.type == "cuda"


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel of `scaled_dot_product_attention` without a mask; "" if unknown.

    `dtype`: of queries, keys and values.
    """
    if device.type != "cuda":
        return ""
    settings: Any = torch.backends.cuda
    is_half = dtype in (torch.float16, torch.bfloat16)
    if is_half and settings.is_flash_attention_available() and settings.flash_sdp_enabled():
        return "flash"
    return "memory-efficient" if settings.mem_efficient_sdp_enabled() else "unfused"
