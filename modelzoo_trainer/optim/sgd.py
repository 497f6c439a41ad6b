"""Gradient descent: plain, with adaptive rates, and averaged."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Lt
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, NonNegativeFloat, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.optimizer import GroupOptimizer, OverModel, Tensors, zeros_like
from modelzoo_trainer.optim.scheduler import Group


@checked_dataclass
class SGD(OverModel, torch.optim.SGD):
    """Stochastic gradient descent.

    Args:
        momentum: Decay of the momentum buffer; 0 = no momentum.
        dampening: Gradients times 1 - dampening are added to the momentum buffer, which starts at
            zero, as in the Cerebras Model Zoo; torch adds the first gradient undamped.
        weight_decay: L2 penalty, added to the gradients.
        nesterov: Whether to use Nesterov momentum; requires `momentum` and no `dampening`.
        maximize: Whether to maximize the loss instead of minimizing it.
    """

    momentum: NonNegativeFloat = 0.0
    dampening: float = 0.0
    weight_decay: NonNegativeFloat = 0.0
    nesterov: bool = False
    maximize: bool = False

    @override
    def _begin(self, groups: Any, defaults: dict[str, Any]) -> None:
        momentum, dampening = defaults["momentum"], defaults["dampening"]
        if defaults["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"SGD.nesterov is true with momentum {momentum} and dampening {dampening}; it "
                f"requires momentum > 0 and dampening 0."
            )
        super()._begin(groups, defaults)

    @override
    def _init_group(self, group: Group, params: Tensors, *lists: Any) -> Any:
        if group["momentum"] and group["dampening"]:
            for param in group["params"]:
                state = self.state[param] if param.grad is not None else None
                if state is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = zeros_like(param)
        return super()._init_group(group, params, *lists)  # type: ignore[no-untyped-call]  # torch's


@checked_dataclass
class Adagrad(OverModel, torch.optim.Adagrad):
    """Adagrad: rates that shrink with the sum of squared gradients.

    Args:
        lr: Learning rate, default 0.01.
        lr_decay: The learning rate is divided by 1 + (step - 1) * lr_decay.
        weight_decay: L2 penalty, added to the gradients.
        initial_accumulator_value: Initial value of the sum of squared gradients.
        eps: Added to the denominator for numerical stability.
        maximize: Whether to maximize the loss instead of minimizing it.
    """

    default_lr: ClassVar = 0.01
    lr_decay: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-6
    maximize: bool = False


@checked_dataclass
class Adadelta(OverModel, torch.optim.Adadelta):
    """Adadelta: rates from averages of squared gradients and updates.

    Args:
        lr: Learning rate, default 1.0.
        rho: Decay rate of the running averages of squared gradients and updates.
        eps: Added to both averages before their roots are taken.
        weight_decay: L2 penalty, added to the gradients.
        maximize: Whether to maximize the loss instead of minimizing it.
    """

    default_lr: ClassVar = 1.0
    rho: Fraction = 0.9
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    maximize: bool = False


@checked_dataclass
class RMSprop(OverModel, torch.optim.RMSprop):
    """RMSprop: rates from a running average of squared gradients.

    Args:
        lr: Learning rate, default 0.01.
        alpha: Decay rate of the running average of squared gradients.
        eps: Added to the denominator for numerical stability.
        weight_decay: L2 penalty, added to the gradients.
        momentum: Decay of the momentum buffer; 0 = no momentum.
        centered: Whether to divide by the standard deviation of the gradient instead of its RMS.
    """

    default_lr: ClassVar = 0.01
    alpha: Fraction = 0.99
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    momentum: NonNegativeFloat = 0.0
    centered: bool = False


@checked_dataclass
class Rprop(OverModel, torch.optim.Rprop):
    """Rprop: rates from the signs of gradients.

    Args:
        etas: Factors of a step size: where the sign of the gradient changes, where it stays.
        step_sizes: Smallest and largest step size.
    """

    etas: tuple[Annotated[float, Gt(0), Lt(1)], Annotated[float, Gt(1)]] = (0.5, 1.2)
    step_sizes: tuple[NonNegativeFloat, NonNegativeFloat] = (1e-6, 50.0)


@checked_dataclass
class ASGD(GroupOptimizer):
    """Averaged stochastic gradient descent.

    The formulas are the same as in `torch.optim.ASGD`, which keeps its counters on the device and
    synchronizes at every step; here they are on the host. The average is the state `ax`, from step
    `t0` on; before, it is a copy of the parameter.

    Args:
        lr: Learning rate, default 0.01.
        lambd: Decay of the parameters in each step, times the current learning rate.
        alpha: Power of the decay of the learning rate.
        t0: Step at which averaging starts.
        weight_decay: L2 penalty, added to the gradients.
        maximize: Whether to maximize the loss instead of minimizing it.
    """

    default_lr: ClassVar = 0.01
    lambd: NonNegativeFloat = 1e-4
    alpha: NonNegativeFloat = 0.75
    t0: NonNegativeFloat = 1e6
    weight_decay: NonNegativeFloat = 0.0
    maximize: bool = False

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        states = self._states(params, group)
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

    @override
    def first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        return {"step": 0, "eta": group["lr"], "mu": 1.0, "ax": zeros_like(param)}


def _count(state: dict[str, Any], group: Group) -> None:
    state["step"] += 1
    lr, step = group["lr"], state["step"]
    state["eta"] = lr / (1 + group["lambd"] * lr * step) ** group["alpha"]
    state["mu"] = 1 / max(1, step - group["t0"])
