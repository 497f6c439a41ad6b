"""Averaged stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.optim.arguments import Factors, Params, groups_of, one_lr
from modelzoo_trainer.optim.checks import check_not_negative
from modelzoo_trainer.optim.param_groups import ParamFilter
from modelzoo_trainer.optim.scheduler import Group
from modelzoo_trainer.optim.update import GroupOptimizer, Tensors, zeros_like


class ASGD(GroupOptimizer):
    """Averaged stochastic gradient descent; lr is 0.01 if none is given.

    The formulas are those of `torch.optim.ASGD`, which keeps its counters on the device and waits
    for them at every step; here they are numbers. The average is the state `ax`, from step `t0`
    on; before, it is a copy of the parameter.
    """

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0.0,
        maximize: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("ASGD", lr, learning_rate, 0.01)
        check_not_negative(self, lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "lambd": lambd,
            "alpha": alpha,
            "t0": t0,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(groups_of(model, lr, weight_decay, params, adjust_learning_rate), defaults)

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        def start(param: Tensor) -> dict[str, Any]:
            return {"step": 0, "eta": group["lr"], "mu": 1.0, "ax": zeros_like(param)}

        states = self._states(params, start)
        sign = -1.0 if group["maximize"] else 1.0
        if group["weight_decay"]:
            decay = sign * group["weight_decay"]
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        etas = [state["eta"] for state in states]
        torch._foreach_mul_(params, [1 - group["lambd"] * eta for eta in etas])
        torch._foreach_add_(params, torch._foreach_mul(grads, [-sign * eta for eta in etas]))
        for param, state in zip(params, states, strict=True):
            if state["mu"] == 1:
                state["ax"].copy_(param)
            else:
                state["ax"].lerp_(param, state["mu"])
            _count(state, group)


def _count(state: dict[str, Any], group: Group) -> None:
    state["step"] += 1
    lr, step = group["lr"], state["step"]
    state["eta"] = lr / (1 + group["lambd"] * lr * step) ** group["alpha"]
    state["mu"] = 1 / max(1, step - group["t0"])
