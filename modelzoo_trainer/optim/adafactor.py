"""Adafactor."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Any

import torch
from annotated_types import Lt
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.optimizer import GroupOptimizer, Tensors, zeros_like
from modelzoo_trainer.optim.scheduler import Group


@checked_dataclass
class Adafactor(GroupOptimizer):
    """Adafactor: Adam with factored second moments (Shazeer and Stern 2018).

    The second moments of a matrix are stored as the means over its rows and its columns. Updates
    are clipped to a root mean square (RMS) of `clip_threshold`, and are relative to the RMS of the
    parameter. (Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv:1804.04235,
    Algorithms 4 and 5, where `eps[0]` is added to squared gradients.)

    Args:
        lr: Learning rate, default 1e-3; not with `relative_step`.
        eps: Lower bounds of the squared gradient and of the RMS of a parameter.
        clip_threshold: Maximum RMS of an update.
        decay_rate: The decay of the second moments is 1 - step ** decay_rate.
        beta1: Decay of the first moment; None = no first moment.
        weight_decay: Decoupled, times the learning rate.
        scale_parameter: Whether the learning rate is relative to the RMS of the parameter.
        relative_step: Whether the learning rate is min(0.01, 1 / sqrt(step)). What schedules and
            `adjust_learning_rate` set is then a factor on it, 1 by default.
        warmup_init: With `relative_step`, whether to start with 1e-6 * step instead of 0.01.
    """

    eps: tuple[NonNegativeFloat, NonNegativeFloat] = (1e-30, 1e-3)
    clip_threshold: PositiveFloat = 1.0
    decay_rate: Annotated[float, Lt(0)] = -0.8
    beta1: Fraction | None = None
    weight_decay: NonNegativeFloat = 0.0
    scale_parameter: bool = True
    relative_step: bool = False
    warmup_init: bool = False

    @override
    def _build(self, **own: Any) -> None:
        lr, learning_rate = own["lr"], own["learning_rate"]
        if own["relative_step"] and (lr is not None or learning_rate is not None):
            raise ConfigError(
                f"Adafactor: set either lr or relative_step=True, not both; got "
                f"lr={learning_rate if lr is None else lr}."
            )
        if own["warmup_init"] and not own["relative_step"]:
            raise ConfigError("Adafactor: warmup_init=True requires relative_step=True.")
        if own["relative_step"]:
            own["lr"] = 1.0
        super()._build(**own)

    @override
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        # One tensor at a time: all squared gradients at once would take the memory that
        # factored moments save.
        for param, grad, state in zip(params, grads, self._states(params, group), strict=True):
            state["step"] += 1
            update = _scaled(grad, state, group)
            size = _step_size(param, state["step"], group)
            update.mul_(size)
            if "exp_avg" in state:
                update = state["exp_avg"].lerp_(update, 1 - group["beta1"])
            if group["weight_decay"]:
                param.mul_(1 - size * group["weight_decay"])
            param.sub_(update)

    @override
    def first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        state: dict[str, Any] = {"step": 0}
        if param.dim() >= 2:
            state["exp_avg_sq_row"] = param.new_zeros(param.shape[:-1])
            state["exp_avg_sq_col"] = param.new_zeros(param.shape[:-2] + param.shape[-1:])
        else:
            state["exp_avg_sq"] = zeros_like(param)
        return state | ({} if group["beta1"] is None else {"exp_avg": zeros_like(param)})


def _scaled(grad: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return the gradient divided by the root of its second moments, clipped."""
    forget = state["step"] ** group["decay_rate"]
    square = grad.square().add_(group["eps"][0])
    if "exp_avg_sq" in state:
        update: Tensor = state["exp_avg_sq"].lerp_(square, forget).rsqrt().mul_(grad)
    else:
        rows = state["exp_avg_sq_row"].lerp_(square.mean(dim=-1), forget)
        columns = state["exp_avg_sq_col"].lerp_(square.mean(dim=-2), forget)
        share = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = share * columns.rsqrt().unsqueeze(-2)
        update.mul_(grad)
    excess = (_rms(update) / group["clip_threshold"]).clamp_(min=1.0)
    return update.div_(excess)


def _step_size(param: Tensor, step: int, group: Group) -> Any:
    size = group["lr"]
    if group["relative_step"]:
        size = size * min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / sqrt(step))
    if group["scale_parameter"]:
        size = _rms(param).clamp_(min=group["eps"][1]) * size
    return size


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm / sqrt(max(tensor.numel(), 1))
