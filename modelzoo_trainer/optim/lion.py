"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.constraints import NonNegativeFloat, checked_dataclass
from modelzoo_trainer.optim.arguments import Betas
from modelzoo_trainer.optim.scheduler import Group
from modelzoo_trainer.optim.update import GroupOptimizer, Tensors, descend, shrink, zeros_like


@checked_dataclass
class Lion(GroupOptimizer):
    """The sign of an interpolated momentum (Chen et al. 2023); lr is 1e-4 if none is given.

    With m = 0 at first, at each step, after the decoupled weight decay:

        param -= lr * sign(beta1 * m + (1 - beta1) * grad);  m = beta2 * m + (1 - beta2) * grad

    (Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, Algorithm 2.)
    """

    default_lr: ClassVar = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        beta1, beta2 = group["betas"]
        averages = [state["exp_avg"] for state in self._states(params, _start)]
        updates = list(torch._foreach_lerp(averages, grads, 1 - beta1))
        torch._foreach_sign_(updates)
        shrink(params, group["lr"], group["weight_decay"])
        descend(params, updates, group["lr"])
        torch._foreach_lerp_(averages, grads, 1 - beta2)


def _start(param: Tensor) -> dict[str, Any]:
    return {"exp_avg": zeros_like(param)}
