"""Batch normalisation's running variance on XLA, made what it is on every other device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm


def correct_batch_norms(model: Module) -> None:
    """Have the running variances of a model average unbiased ones, as torch's documentation says.

    torch_xla 2.9.0 averages biased ones, smaller by (n - 1) / n for n values to a channel. The
    numbers of a training step are right; those of a validation, which uses the average, are not.
    """
    for module in model.modules():
        is_meant = isinstance(module, _BatchNorm) and module.track_running_stats
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

    def remember(self, module: _BatchNorm, args: tuple[Any, ...]) -> None:
        """Keep the average from before."""
        variance = module.running_var
        is_here = module.training and variance is not None and variance.device.type == "xla"
        self._before = variance.clone() if is_here and variance is not None else None

    def correct(self, module: _BatchNorm, args: tuple[Any, ...], output: Tensor) -> None:
        """Make the part that came in anew n / (n - 1) times as large."""
        before, self._before = self._before, None
        if before is None or module.running_var is None or module.momentum is None:
            return
        num = output.numel() // output.shape[1]
        # Autograd has noted the average's version, though it needs it no more.
        with torch.no_grad(), _unsafe_preserve_version_counter(module.running_var):
            part = module.running_var - (1 - module.momentum) * before
            module.running_var.add_(part / (num - 1))
