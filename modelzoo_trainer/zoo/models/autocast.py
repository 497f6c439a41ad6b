"""What automatic mixed precision does to an operation, and computing without it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which operations keep the dtype of their inputs."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def product_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes with these states."""
    kind = states.device.type
    # A compiled graph of torch 2.9 cannot ask whether there is autocast, and need not.
    is_known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    is_cast = is_known and states.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else states.dtype
