"""Gradient descent with and without rates of each parameter's own, and averaged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.arguments import Factors, Params, groups_of, one_lr
from modelzoo_trainer.optim.checks import check_fractions, check_not_negative, check_pair
from modelzoo_trainer.optim.param_groups import ParamFilter
from modelzoo_trainer.optim.scheduler import Group
from modelzoo_trainer.optim.update import GroupOptimizer, Tensors, zeros_like


class SGD(torch.optim.SGD):
    """Stochastic gradient descent; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("SGD", lr, learning_rate, 1e-3)
        check_not_negative(self, lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"SGD.nesterov is true with momentum {momentum} and dampening {dampening}; it "
                f"needs a momentum above 0 and no dampening."
            )
        super().__init__(
            groups_of(model, lr, weight_decay, params, adjust_learning_rate),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )


class Adagrad(torch.optim.Adagrad):
    """Rates that shrink with the sum of squared gradients; lr is 0.01 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-6,
        maximize: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("Adagrad", lr, learning_rate, 0.01)
        check_not_negative(self, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        check_not_negative(self, initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            groups_of(model, lr, weight_decay, params, adjust_learning_rate),
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
        )


class Adadelta(torch.optim.Adadelta):
    """Rates from averages of squared gradients and updates; lr is 1.0 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        maximize: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("Adadelta", lr, learning_rate, 1.0)
        check_not_negative(self, lr=lr, eps=eps, weight_decay=weight_decay)
        check_fractions(self, rho=rho)
        super().__init__(
            groups_of(model, lr, weight_decay, params, adjust_learning_rate),
            lr=lr,
            rho=rho,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )


class RMSprop(torch.optim.RMSprop):
    """Rates from a running average of squared gradients; lr is 0.01 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("RMSprop", lr, learning_rate, 0.01)
        check_not_negative(self, lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
        check_fractions(self, alpha=alpha)
        super().__init__(
            groups_of(model, lr, weight_decay, params, adjust_learning_rate),
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
        )


class Rprop(torch.optim.Rprop):
    """Rates from the signs of gradients; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        lr = one_lr("Rprop", lr, learning_rate, 1e-3)
        check_pair(self, etas=etas, step_sizes=step_sizes)
        check_not_negative(self, lr=lr, step_sizes=step_sizes)
        if not 0 < etas[0] < 1 < etas[1]:
            raise ConfigError(
                f"Rprop.etas is {list(etas)}; the first must be between 0 and 1, the second above "
                f"1."
            )
        super().__init__(
            groups_of(model, lr, None, params, adjust_learning_rate),
            lr=lr,
            etas=etas,
            step_sizes=step_sizes,
        )


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
