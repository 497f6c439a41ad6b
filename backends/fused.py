"""Optimizers that update all parameters in one kernel and leave the loss scale on the device."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# A subclass before its base.
_KERNELS: Final[dict[type[Optimizer], str]] = {
    AdamW: "aten::_fused_adamw_",
    Adam: "aten::_fused_adam_",
    SGD: "aten::_fused_sgd_",
    Adagrad: "aten::_fused_adagrad_",
}


def fuse_optimizer(optimizer: Optimizer, device: torch.device) -> bool:
    """Switch an optimizer to its fused form, in place, where that is possible and not decided.

    The state dict stays as without it, so that a checkpoint fits every device.

    Args:
        optimizer: Left alone if it is none of torch's Adam, AdamW, SGD and Adagrad, if `foreach`
            or `fused` was chosen, if a momentum is dampened, or if a parameter is not a floating
            point one on `device`.
        device: Where the parameters are.

    Returns:
        Whether it was switched.
    """
    kernel = _kernel_of(optimizer)
    if kernel is None or not _has_kernel(kernel, device) or not _fits(optimizer, device):
        return False
    choices = [group.get("fused") for group in optimizer.param_groups]
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler asks
    _switch(optimizer)

    def restore(_: Optimizer, state: dict[str, Any]) -> None:
        for group, choice in zip(state["param_groups"], choices, strict=False):
            group["fused"] = choice

    optimizer.register_state_dict_post_hook(restore)
    optimizer.register_load_state_dict_post_hook(_switch)
    return True


def _kernel_of(optimizer: Optimizer) -> str | None:
    for cls, kernel in _KERNELS.items():
        if isinstance(optimizer, cls):
            own = inspect.unwrap(type(optimizer).step)  # torch wraps it for its profiler
            return kernel if own is inspect.unwrap(cls.step) else None
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
            return False  # a momentum of zeros would be dampened in the first step
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
    """Give parameters without a momentum one of zeros, which is the same.

    Left to torch's fused step, it is memory as it was found if a loss scaler leaves out the first
    step, and an error if only some of the parameters have one.
    """
    for param in params:
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)
