"""Batch normalisation's running variance on XLA, made what it is on every other device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import BackendError

_Norm = _BatchNorm | _InstanceNorm


def check_batch_norms(model: Module) -> None:
    """Refuse what reads on the host in each step.

    Raises:
        BackendError: If an average has no momentum.
    """
    for name, module in model.named_modules():
        if isinstance(module, _Norm) and module.track_running_stats and module.momentum is None:
            raise BackendError(
                f"{name or type(module).__name__} is a {type(module).__name__} with "
                f"momentum=None, which reads its count on the host in every step. Set a momentum."
            )


def correct_batch_norms(model: Module) -> None:
    """Have the running variances of a model average unbiased ones, as torch's documentation says.

    torch_xla 2.9.0 averages biased ones, smaller by (n - 1) / n for n values to a channel. The
    numbers of a training step are right; those of a validation, which uses the average, are not.
    """
    for module in model.modules():
        is_meant = isinstance(module, _Norm) and module.track_running_stats
        if is_meant and not _is_corrected(module):
            correction = _Correction()
            module.register_forward_pre_hook(correction.remember)
            module.register_forward_hook(correction.correct)


def _is_corrected(module: Module) -> bool:
    hooks = module._forward_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), _Correction) for hook in hooks)


class _Correction:
    """Adds what the average of one module lacks after each forward pass in training."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def remember(self, module: _Norm, args: tuple[Any, ...]) -> None:
        """Keep the average from before."""
        variance = module.running_var
        is_here = module.training and variance is not None and variance.device.type == "xla"
        self._before = variance.clone() if is_here and variance is not None else None

    def correct(self, module: _Norm, args: tuple[Any, ...], output: Tensor) -> None:
        """Make the part that came in anew n / (n - 1) times as large."""
        before, self._before = self._before, None
        if before is None or module.running_var is None or module.momentum is None:
            return
        num = _num_values(module, output)
        # Autograd has noted the average's version, though it needs it no more.
        with torch.no_grad(), _unsafe_preserve_version_counter(module.running_var):
            part = module.running_var - (1 - module.momentum) * before
            module.running_var.add_(part / (num - 1))


def _num_values(module: _Norm, output: Tensor) -> int:
    """Return how many values a variance is of."""
    if isinstance(module, _InstanceNorm):  # of each sample; their variances are averaged
        num_dims: int = module._get_no_batch_dim() - 1  # type: ignore[no-untyped-call]  # torch's
        return output.shape[-num_dims:].numel()
    return output.numel() // output.shape[1]
