"""Norms of gradients and state, and clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .backend import Backend


class Norms:
    """Norms of tensors that this rank holds completely.

    Nothing waits for the device. Where a rank holds only a shard of the state, everything here is
    collective, and the results are equal on all ranks.

    Args:
        backend: Its device holds the results.
        clipping: Returns the context for gradient clipping.
    """

    def __init__(
        self,
        backend: Backend,
        clipping: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._backend = backend
        self._clipping = clipping

    def grad_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the joint 2-norm of all gradients, (), in float32, or in double if one is double.

        Parameters without a gradient are ignored.
        """
        return joint_grad_norm(parameters, self._backend.device)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to a joint 2-norm of at most `max_norm`.

        Returns:
            The norm before, (), on the device. Non-finite gradients do not raise.
        """
        with self._clipping():
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clip each gradient's elements to [-max_value, max_value]."""
        with self._clipping():
            torch.nn.utils.clip_grad_value_(parameters, max_value)

    def tensor_norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the 2-norm of each full tensor, (), in float32 or wider."""
        with torch.no_grad():
            return part_norms(list(tensors))


def joint_grad_norm(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the joint 2-norm of unsharded gradients; see `Norms.grad_norm`."""
    grads = [param.grad.detach() for param in parameters if param.grad is not None]
    # Duplicate entries of a sparse gradient are not summed, which would wait.
    parts = [grad._values() if grad.is_sparse else grad for grad in grads]
    if not parts:
        return torch.zeros((), device=device)
    joint: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in part_norms(parts)])
    )
    return joint


def part_norms(parts: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in float32 or wider: half precision would overflow."""
    if {part.dtype for part in parts} <= _SINGLE:
        return list(torch._foreach_norm(parts))
    return [torch.linalg.vector_norm(part.to(_wide(part))) for part in parts]


_SINGLE = frozenset({torch.float32})


def _wide(part: Tensor) -> torch.dtype:
    if part.is_complex():
        return torch.promote_types(part.dtype, torch.complex64)
    return torch.float64 if part.dtype is torch.float64 else torch.float32
