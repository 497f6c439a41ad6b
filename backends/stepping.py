"""An optimizer's step and zero_grad without the profiler's label, when nobody would see it."""

from typing import Any

import torch
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
