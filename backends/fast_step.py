"""An optimizer's step and zero_grad without the profiler's label, and its gradients' norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer


def plain_step(optimizer: Optimizer) -> None:
    """Update the parameters, as `optimizer.step()` does.

    torch wraps every `step` in a label for its profiler and a look for hooks, which costs more
    than a small layer. The method inside is called directly if there is neither a profiler nor a
    hook, and nothing has been put on the instance (torch's schedulers do that).
    """
    method: Any = type(optimizer).step
    inner = getattr(method, "__wrapped__", None) if getattr(method, "hooked", False) else None
    if (
        inner is None
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or _torch_optimizer._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # not declared
    ):
        optimizer.step()
    else:
        inner(optimizer)


def plain_zero_grad(optimizer: Optimizer) -> None:
    """Drop the gradients, as `optimizer.zero_grad(set_to_none=True)` does.

    An optimizer that brings its own method has that called.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def grad_norm(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the joint 2-norm of all gradients, in float32, or in double if one is double.

    Args:
        parameters: Those without a gradient are left out.
        device: Where the result is.
    """
    grads = [param.grad.detach() for param in parameters if param.grad is not None]
    # Entries of a sparse one that stand for the same place are not added up, which would wait.
    parts = [grad._values() if grad.is_sparse else grad for grad in grads]
    if not parts:
        return torch.zeros((), device=device)
    if all(part.dtype is torch.float32 for part in parts):
        norms = list(torch._foreach_norm(parts))
    else:
        norms = [torch.linalg.vector_norm(part.to(_wide(part.dtype))) for part in parts]
    joint: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    return joint


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type in which a norm does not overflow before its gradient does."""
    return torch.promote_types(dtype, torch.float32)
