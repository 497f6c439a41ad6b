"""Lamb."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.constraints import NonNegativeFloat, checked_dataclass
from modelzoo_trainer.optim.arguments import Betas
from modelzoo_trainer.optim.scheduler import Group
from modelzoo_trainer.optim.update import GroupOptimizer, Tensors, descend, zeros_like

LARGEST_NORM: Final = 10.0
"""What the norm of a parameter counts at most (the bound of phi in the paper)."""


@checked_dataclass
class Lamb(GroupOptimizer):
    """Adam with a rate for each tensor, for large batches; lr is 1e-3 if none is given.

    With m and v Adam's moments, without bias correction (You et al. 2020, version 3):

        update = m / (sqrt(v) + eps) + weight_decay * param
        param -= lr * min(norm(param), 10) / norm(update) * update

    where the ratio is 1 if one of the norms is 0, or `adam` is true. (Large Batch Optimization
    for Deep Learning: Training BERT in 76 minutes, arXiv:1904.00962, Algorithm 2.)
    """

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    adam: bool = False

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        beta1, beta2 = group["betas"]
        states = self._states(params, _start)
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(averages, roots))
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if not group["adam"]:
            torch._foreach_mul_(updates, _ratios(params, updates))
        descend(params, updates, group["lr"])


def _start(param: Tensor) -> dict[str, Any]:
    return {"exp_avg": zeros_like(param), "exp_avg_sq": zeros_like(param)}


def _ratios(params: Tensors, updates: Tensors) -> Tensors:
    norms = torch.stack(torch._foreach_norm(params))
    lengths = torch.stack(torch._foreach_norm(updates))
    known = (norms > 0) & (lengths > 0)
    return list(torch.where(known, norms.clamp(max=LARGEST_NORM) / lengths, 1.0).unbind())
