"""Optimizer steps without torch's overhead: no profiler label, fused kernels."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import optimizer as _torch_optimizer


def plain_step(optimizer: Optimizer) -> None:
    """Update the parameters, like `optimizer.step()`.

    torch wraps every `step` in a profiler label and hook lookups, which cost more than a small
    layer. The inner method is called directly if there is no profiler, no hook, and no `step` set
    on the instance (torch's schedulers do that).
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
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # undeclared
    ):
        optimizer.step()
    else:
        inner(optimizer)


def plain_zero_grad(optimizer: Optimizer) -> None:
    """Drop the gradients, like `optimizer.zero_grad(set_to_none=True)`.

    Calls an optimizer's own method if it overrides torch's.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


# Subclasses before their bases.
_KERNELS: Final[dict[type[Optimizer], str]] = {
    AdamW: "aten::_fused_adamw_",
    Adam: "aten::_fused_adam_",
    SGD: "aten::_fused_sgd_",
    Adagrad: "aten::_fused_adagrad_",
}


def fuse_optimizer(optimizer: Optimizer, device: torch.device) -> bool:
    """Switch an optimizer to its fused kernels, in place, unless the user has chosen.

    The state dict is unchanged, so that a checkpoint works on every device.

    No-op if it is not torch's Adam, AdamW, SGD or Adagrad, if `foreach` or `fused` is set, with
    `dampening` and momentum, or if a parameter is not a floating-point one on `device`.

    Returns:
        Whether it was switched.
    """
    kernel = _kernel_of(optimizer)
    if kernel is None or not _has_kernel(kernel, device) or not _fits(optimizer, device):
        return False
    choices = [group.get("fused") for group in optimizer.param_groups]
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # read by GradScaler
    _switch(optimizer)

    def restore(_: Optimizer, state: dict[str, Any]) -> None:
        for group, choice in zip(state["param_groups"], choices, strict=False):
            group["fused"] = choice

    optimizer.register_state_dict_post_hook(restore)
    optimizer.register_load_state_dict_post_hook(_switch)
    return True


def step_of(cls: type[Optimizer]) -> Any:
    """Return the function that is the `step` of a class, without torch's profiler around it.

    One that calls the kernels of a class of torch names its `step` in the attribute `replaces`,
    which is then returned: what holds for that class holds for this one.
    """
    own = inspect.unwrap(cls.step)
    replaced = getattr(own, "replaces", None)
    return own if replaced is None else inspect.unwrap(replaced)


def _kernel_of(optimizer: Optimizer) -> str | None:
    for cls, kernel in _KERNELS.items():
        if isinstance(optimizer, cls):
            return kernel if step_of(type(optimizer)) is step_of(cls) else None
    return None


def _has_kernel(kernel: str, device: torch.device) -> bool:
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(kernel, key)


def _fits(optimizer: Optimizer, device: torch.device) -> bool:
    for group in optimizer.param_groups:
        if group.get("foreach") is not None or group.get("fused") is not None:
            return False
        if group.get("differentiable"):
            return False
        if group.get("momentum") and group.get("dampening"):
            return False  # the first step would dampen a zero momentum
        for param in group["params"]:
            if param.device.type != device.type or not param.is_floating_point():
                return False
    return True


def _switch(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"] = True
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.device != param.device:
                # The fused kernels count on the device, the others on the host.
                state["step"] = step.to(param.device, torch.float32)
        if isinstance(optimizer, SGD) and group["momentum"]:
            _begin_momentum(optimizer, group["params"])


def _begin_momentum(optimizer: Optimizer, params: list[torch.Tensor]) -> None:
    """Create zero momentum for parameters without one, which is equivalent.

    Otherwise torch's fused step leaves it uninitialized if a loss scaler skips the first step, and
    raises if only some parameters have one.
    """
    for param in params:
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)
