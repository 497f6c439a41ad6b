"""Tensors that several processes share: whole, or divided as another one is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of several processes."""
    return isinstance(value, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Collective if it is one of several processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distribute(tensor: Tensor, like: DTensor) -> DTensor:
    """Return a tensor that every process has whole, divided as another one is.

    Args:
        tensor: The same on every process.
        like: Of its shape.
    """
    on_device = tensor.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)
