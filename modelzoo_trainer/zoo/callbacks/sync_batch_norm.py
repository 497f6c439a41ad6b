"""Batch normalization synchronized over all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

Reduce = Callable[[Tensor], Tensor]

_PLAIN = (BatchNorm1d, BatchNorm2d, BatchNorm3d)


class SharedBatchNorm(_BatchNorm):
    """Normalize with the mean and variance over all processes; works on the CPU as well.

    In training, it equals torch's batch normalization of the concatenated batches of all processes;
    in eval mode, it is torch's.

    `reduce`: returns the sum of a tensor over the processes; collective, without a gradient.

    Shapes:
        Input: (samples, channels, ...), with as many channels as `like` has; same for the output.

    Cost: Two all-reduces of a vector in the forward pass, and two in the backward pass.
    """

    def __init__(self, like: _BatchNorm, reduce: Reduce) -> None:
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        self._reduce = _Kept(reduce)
        self._parameters = like._parameters
        self._buffers = like._buffers
        self.training = like.training

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, wide.dim())]
        total = wide.sum(dims)
        num = total.new_full((1,), wide.numel() // wide.shape[1])
        sums = self._sum(torch.cat((total, num)))
        num = sums[-1].detach()
        mean = sums[:-1] / num
        shape = [1, -1, *[1] * (wide.dim() - 2)]
        centred = wide - mean.view(shape)
        var = self._sum(centred.square().sum(dims)) / num
        self._note(mean.detach(), var.detach(), num)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _sum(self, tensor: Tensor) -> Tensor:
        found: Tensor = _Sum.apply(tensor, self._reduce.function)  # type: ignore[no-untyped-call]  # torch's
        return found

    @torch.no_grad()
    def _note(self, mean: Tensor, var: Tensor, num: Tensor) -> None:
        """Update the running statistics with a batch's statistics, as torch does."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None  # they exist together
        self.num_batches_tracked.add_(1)
        unbiased = var * (num / (num - 1).clamp_min(1))
        if self.momentum is None:
            share = 1.0 / self.num_batches_tracked.to(mean.dtype)
        else:
            share = torch.full((), self.momentum, dtype=mean.dtype, device=mean.device)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), share.to(running.dtype))


class _Sum(torch.autograd.Function):
    """Sum over processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.reduce(grads[0]), None


class _Kept:
    """Hold a function that copies of a module share."""

    def __init__(self, function: Reduce) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def share_batch_norms(model: Module, reduce: Reduce) -> tuple[Module, int]:
    """Replace torch's batch normalization layers of a model by synchronized ones.

    Returns:
        The model, and the number of replaced layers.
    """
    if type(model) in _PLAIN:
        return SharedBatchNorm(model, reduce), 1  # type: ignore[arg-type]  # one of these three
    num = 0
    replaced: dict[int, Module] = {}  # a layer may be used several times
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) in _PLAIN:
                if id(child) not in replaced:
                    replaced[id(child)] = SharedBatchNorm(child, reduce)  # type: ignore[arg-type]  # likewise
                    num += 1
                module._modules[name] = replaced[id(child)]
    return model, num
