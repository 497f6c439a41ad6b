"""Adam and its variants, with the defaults of the Cerebras Model Zoo."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeFloat, checked_dataclass
from modelzoo_trainer.optim.adam_step import AdamStep, Counts, Lists
from modelzoo_trainer.optim.optimizer import (
    Betas,
    GroupOptimizer,
    OverModel,
    Tensors,
    descend,
    shrink,
    zeros_like,
)
from modelzoo_trainer.optim.scheduler import Group

log = logging.getLogger("modelzoo_trainer.optimizer")

_OURS: Final[tuple[str, ...]] = (
    "correct_bias",
    "l2_regularization_rate",
    "eps_after_correction",
)
"""Settings that torch's constructors do not accept."""

_AFTER: Final = "eps_after_correction"
_FORMULA_KEPT: Final = (
    "The checkpoint's %s adds eps after the bias correction, as in torch. This run continues so. A "
    "new run adds it before, as the Cerebras Model Zoo does; to add it after in a new run, set "
    "eps_after_correction to true in %s."
)

if TYPE_CHECKING:

    class _Adam(OverModel, torch.optim.Adam):
        pass
else:
    _Adam = OverModel  # before torch's Adam or AdamW, whichever comes next in a class


@checked_dataclass
class _AnyBias(_Adam):
    """Torch's Adam with eps added before the bias correction, or without bias correction.

    Bias correction divides a moment by 1 - beta ** step. If steps are counted from infinity, that
    is 1 in every implementation of torch's Adam (fused kernels too), without a branch.

    Args:
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator for numerical stability.
        eps_after_correction: Whether eps is added after the bias correction, as in torch, or
            before, as in the Cerebras Model Zoo.
    """

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    eps_after_correction: bool = field(default=False, kw_only=True)

    @override
    def _begin(self, groups: Any, defaults: dict[str, Any]) -> None:
        ours = {key: defaults.pop(key) for key in _OURS if key in defaults}
        self._counts = Counts()
        super()._begin(groups, defaults)
        self.defaults.update(ours)
        for group in self.param_groups:
            group.update(ours | group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, skips = (getattr(self, key, None) for key in ("grad_scale", "found_inf"))
        for idx, group in enumerate(self.param_groups):
            lists: Lists = ([], [], [], [], [], [])
            has_complex = self._init_group(group, *lists)
            if not lists[0]:
                continue
            step = AdamStep(group, lists, has_complex, scale, skips)
            if group["eps_after_correction"] or not group.get("correct_bias", True):
                step.as_torch()
            elif step.counts_on_device:
                step.as_published(self._counts.parts(idx, lists[0]))
            else:
                step.as_published(None)
        return loss

    inspect.unwrap(step).replaces = torch.optim.Adam.step  # for backends

    @override
    def _init_group(self, group: Group, params: list[Tensor], *lists: Any) -> Any:
        start = self._without_state(group)
        result = super()._init_group(group, params, *lists)  # type: ignore[no-untyped-call]  # torch's
        for param in start:
            self._counts.forget(param)
            if not group.get("correct_bias", True):
                self.state[param]["step"].fill_(inf)
        return result

    def _without_state(self, group: Group) -> list[Tensor]:
        return [one for one in group["params"] if one.grad is not None and not self.state[one]]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; one without `eps_after_correction` was written by torch's Adam."""
        is_of_torch = any(_AFTER not in group for group in state_dict["param_groups"])
        super().load_state_dict(state_dict)
        if is_of_torch and not self.defaults[_AFTER]:
            log.warning(_FORMULA_KEPT, type(self).__name__, type(self).__name__)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        for group in self.param_groups:
            group.setdefault(_AFTER, True)
        self._counts = Counts()
        self._counts.load(
            {param: float(own["step"]) for param, own in self.state.items() if "step" in own}
        )


@checked_dataclass
class AdamW(_AnyBias, torch.optim.AdamW):
    """Adam with decoupled weight decay (AdamW).

    Args:
        weight_decay: Decoupled: times the learning rate, subtracted from the parameters.
        correct_bias: Whether to correct the bias of the averages in the first steps.
        amsgrad: Whether to use the AMSGrad variant: the maximum of all squared averages.
    """

    correct_bias: bool = True
    amsgrad: bool = False


@checked_dataclass
class Adam(_AnyBias, torch.optim.Adam):
    """Adam, with weight decay as an L2 penalty.

    Args:
        weight_decay: L2 penalty, added to the gradients.
        correct_bias: Whether to correct the bias of the averages in the first steps.
        amsgrad: Whether to use the AMSGrad variant: the maximum of all squared averages.
    """

    correct_bias: bool = True
    amsgrad: bool = False


@checked_dataclass
class AdamBase(_AnyBias, torch.optim.AdamW):
    """Adam with both kinds of weight decay.

    `weight_decay` is decoupled, as in AdamW; `l2_regularization_rate` times the parameters is added
    to the gradients, as in Adam, for all parameters including biases and norms.

    Args:
        weight_decay: Decoupled: times the learning rate, subtracted from the parameters.
        l2_regularization_rate: L2 penalty, added to the gradients.
        correct_bias: Whether to correct the bias of the averages in the first steps.
        amsgrad: Whether to use the AMSGrad variant: the maximum of all squared averages.
    """

    l2_regularization_rate: NonNegativeFloat = 0.0
    correct_bias: bool = True
    amsgrad: bool = False

    @override
    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], *lists: Any
    ) -> Any:
        result = super()._init_group(group, params, grads, *lists)
        rate = group.get("l2_regularization_rate", 0.0)
        if rate and params:
            added = torch._foreach_mul(params, rate)
            scale = getattr(self, "grad_scale", None)
            if scale is not None:  # a fused kernel receives scaled gradients
                torch._foreach_mul_(added, scale)
            grads[:] = torch._foreach_add(grads, added)
        return result


@checked_dataclass
class Adamax(OverModel, torch.optim.Adamax):
    """Adamax: Adam with the infinity norm.

    Args:
        betas: Decay rates of the running average of the gradient and of its infinity norm.
        eps: Added to the denominator for numerical stability.
        weight_decay: L2 penalty, added to the gradients.
        maximize: Whether to maximize the loss instead of minimizing it.
    """

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    maximize: bool = False


@checked_dataclass
class NAdam(OverModel, torch.optim.NAdam):
    """NAdam: Adam with Nesterov momentum.

    Args:
        lr: Learning rate, default 2e-3.
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator for numerical stability.
        weight_decay: L2 penalty, added to the gradients.
        momentum_decay: How fast the momentum approaches its final value.
    """

    default_lr: ClassVar = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    momentum_decay: NonNegativeFloat = 4e-3

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # As a tensor, torch would move the product to the device and read it in every step.
        state = {
            idx: {key: float(value) if key == "mu_product" else value for key, value in own.items()}
            for idx, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


@checked_dataclass
class RAdam(OverModel, torch.optim.RAdam):
    """RAdam: Adam with a rectified adaptive rate.

    Args:
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator for numerical stability.
        weight_decay: L2 penalty, added to the gradients.
    """

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0


LARGEST_NORM: Final = 10.0
"""Upper bound of the norm of a parameter (of phi in the paper)."""


@checked_dataclass
class Lamb(GroupOptimizer):
    """LAMB: Adam with a trust ratio per tensor, for large batches.

    With m and v the moments of Adam, without bias correction (You et al. 2020, version 3):

        update = m / (sqrt(v) + eps) + weight_decay * param
        param -= lr * min(norm(param), 10) / norm(update) * update

    where the ratio is 1 if one of the norms is 0, or if `adam` is true. (Large Batch Optimization
    for Deep Learning: Training BERT in 76 minutes, arXiv:1904.00962, Algorithm 2.)

    Args:
        betas: Decay rates of the running averages of the gradient and of its square.
        eps: Added to the denominator for numerical stability.
        weight_decay: Decoupled; part of the update that the trust ratio scales.
        adam: Whether the trust ratio is always 1.
    """

    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    adam: bool = False

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        beta1, beta2 = group["betas"]
        states = self._states(params, group)
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

    @override
    def first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        return {"exp_avg": zeros_like(param), "exp_avg_sq": zeros_like(param)}


def _ratios(params: Tensors, updates: Tensors) -> Tensors:
    norms = torch.stack(torch._foreach_norm(params))
    lengths = torch.stack(torch._foreach_norm(updates))
    known = (norms > 0) & (lengths > 0)
    return list(torch.where(known, norms.clamp(max=LARGEST_NORM) / lengths, 1.0).unbind())


@checked_dataclass
class Lion(GroupOptimizer):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023).

    With m = 0 initially, in each step, after decoupled weight decay:

        param -= lr * sign(beta1 * m + (1 - beta1) * grad);  m = beta2 * m + (1 - beta2) * grad

    (Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, Algorithm 2.)

    Args:
        lr: Learning rate, default 1e-4.
        betas: Weight of the momentum in the update, and its decay rate.
        weight_decay: Decoupled: times the learning rate, subtracted from the parameters.
    """

    default_lr: ClassVar = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        beta1, beta2 = group["betas"]
        averages = [state["exp_avg"] for state in self._states(params, group)]
        updates = list(torch._foreach_lerp(averages, grads, 1 - beta1))
        torch._foreach_sign_(updates)
        shrink(params, group["lr"], group["weight_decay"])
        descend(params, updates, group["lr"])
        torch._foreach_lerp_(averages, grads, 1 - beta2)

    @override
    def first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        return {"exp_avg": zeros_like(param)}
