"""A step of Adam that adds eps before the bias correction, with the kernels of torch.

With the moments m and v, torch's Adam and the Cerebras Model Zoo differ in what eps is added to:

    torch      m / (1 - beta1 ** step) / (sqrt(v / (1 - beta2 ** step)) + eps)
    Cerebras   m / (sqrt(v) + eps) * sqrt(1 - beta2 ** step) / (1 - beta1 ** step)

The second is torch's update without bias correction, times a factor that depends only on the step.
So torch's kernels are given steps of infinity, which makes their own corrections 1, and a learning
rate that includes the factor. Decoupled weight decay, which must not include it, is applied before.
Where steps are counted on a device, the factor is computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from math import inf, log, pow, sqrt
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adam import adam

from modelzoo_trainer.optim.optimizer import Tensors
from modelzoo_trainer.optim.scheduler import Group

Lists = tuple[Tensors, Tensors, Tensors, Tensors, Tensors, Tensors]
"""Parameters, gradients, both moments, the largest second ones (AMSGrad) and steps."""
Parts = list[list[int]]

_SETTINGS: Final = (
    *("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    *("amsgrad", "lr", "weight_decay", "eps", "maximize"),
)


class Counts:
    """Which parameters have been updated equally often, without reading counts on a device.

    Parameters that were updated in the same steps stay together. `load` compares their counts.
    """

    def __init__(self) -> None:
        self._of: dict[Tensor, int] = {}
        self._num = 0
        self._last: dict[int, tuple[Sequence[Tensor], Parts]] = {}

    def load(self, counts: dict[Tensor, float]) -> None:
        """Group parameters by their counts."""
        numbers = {count: idx for idx, count in enumerate(dict.fromkeys(counts.values()))}
        self._of = {param: numbers[count] for param, count in counts.items()}
        self._num, self._last = len(numbers), {}

    def forget(self, param: Tensor) -> None:
        """Note that the state of a parameter is about to be created."""
        if self._of.pop(param, None) is not None:
            self._last = {}

    def parts(self, group: int, params: Sequence[Tensor]) -> Parts:
        """Note an update of parameters, and return the positions of those with equal counts."""
        last, parts = self._last.get(group, ((), []))
        if len(params) == len(last) and all(map(is_, params, last)):
            return parts
        found: dict[int | None, list[int]] = {}
        for idx, param in enumerate(params):
            found.setdefault(self._of.get(param), []).append(idx)
        for part in found.values():
            self._of |= dict.fromkeys((params[idx] for idx in part), self._num)
            self._num += 1
        self._last[group] = list(params), list(found.values())
        return self._last[group][1]


@dataclass(slots=True)
class AdamStep:
    """A step of the parameters in a group."""

    group: Group
    lists: Lists
    has_complex: bool
    grad_scale: Tensor | None = None
    """Scale of the gradients; only for fused kernels, as `found_inf`."""
    found_inf: Tensor | None = None
    """Flag on the device: whether to change nothing."""

    @property
    def counts_on_device(self) -> bool:
        """Whether the steps are on the device of the parameters."""
        return bool(self.group["fused"] or self.group["capturable"])

    def as_torch(self) -> None:
        """Add eps after the bias correction."""
        self._call(self.lists)

    def as_published(self, parts: Parts | None) -> None:
        """Add eps before the bias correction.

        `parts`: Positions of parameters with equal steps, if these are on the device.
        """
        steps = self.lists[-1]
        torch._foreach_add_(steps, 1)
        endless = list(torch._foreach_add(steps, inf))
        for part in _equal(steps) if parts is None else parts:
            chosen = [
                [one[idx] for idx in part] if one else one for one in (*self.lists[:-1], endless)
            ]
            self._update(chosen, steps[part[0]])
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf.to(steps[0].device)] * len(steps))

    def _update(self, lists: Sequence[Tensors], step: Tensor) -> None:
        lr, weight_decay = self.group["lr"], self.group["weight_decay"]
        if self.group["decoupled_weight_decay"]:
            _shrink(lists[0], lr, weight_decay, self.found_inf)
            weight_decay = 0.0
        factor = _factor(step, self.group["betas"], on_device=self.counts_on_device)
        rate = factor * lr
        if isinstance(factor, Tensor):
            rate = rate.to(factor.dtype)
        self._call(lists, lr=rate, weight_decay=weight_decay)

    def _call(self, lists: Sequence[Tensors], **changed: Any) -> None:
        """Call torch's Adam, with some settings changed."""
        group = self.group
        beta1, beta2 = group["betas"]
        settings: Any = {key: group[key] for key in _SETTINGS} | changed
        settings |= {"beta1": beta1, "beta2": beta2, "has_complex": self.has_complex}
        settings |= {"grad_scale": self.grad_scale, "found_inf": self.found_inf}
        params, grads, averages, squares, largest, steps = lists
        adam(params, grads, averages, squares, largest, steps, **settings)


def _equal(steps: Tensors) -> Parts:
    """Return the positions of steps on the host that are equal."""
    found: dict[float, list[int]] = {}
    for idx, step in enumerate(steps):
        found.setdefault(float(step), []).append(idx)
    return list(found.values())


def _factor(step: Tensor, betas: tuple[float, float], *, on_device: bool) -> float | Tensor:
    """Return sqrt(1 - beta2 ** step) / (1 - beta1 ** step), of betas in float32 as in Cerebras'."""
    first, second = map(_in_float32, betas)
    if not on_device:
        count = float(step)
        return sqrt(1 - pow(second, count)) / (1 - pow(first, count))
    factor: Tensor = _correction(step, second).sqrt_().div_(_correction(step, first))
    return factor


def _correction(step: Tensor, beta: float) -> Tensor:
    """Return 1 - beta ** step; the plain formula would lose digits in float32."""
    return torch.expm1(step * (log(beta) if beta else -inf)).neg_()


def _in_float32(beta: float) -> float:
    rounded = c_float(beta).value
    return rounded if rounded < 1 else beta


def _shrink(
    params: Tensors, lr: float | Tensor, weight_decay: float, found_inf: Tensor | None
) -> None:
    """Apply decoupled weight decay unless a flag is set.

    Subtracted, as in the fused kernels: a factor 1 - lr * weight_decay would be rounded to the
    dtype of the parameters.
    """
    if not weight_decay:
        return
    device = params[0].device
    parts, alpha = params, -weight_decay
    if isinstance(lr, Tensor):
        parts = list(torch._foreach_mul(parts, lr.to(device)))
    else:
        alpha = alpha * lr
    if found_inf is not None:
        parts = list(torch._foreach_mul(parts, 1 - found_inf.to(device)))
    torch._foreach_add_(params, parts, alpha=alpha)
