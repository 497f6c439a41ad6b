"""What the optimizers that are not torch's share: the walk over groups, and their arithmetic."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.optim.arguments import OverModel
from modelzoo_trainer.optim.scheduler import Group

Tensors = list[Tensor]


class GroupOptimizer(OverModel, Optimizer):
    """Base of optimizers that update the parameters of a group together.

    Nothing is read on the host, and the learning rate may be a tensor.
    """

    @override
    def _begin(self, groups: Any, defaults: dict[str, Any]) -> None:
        Optimizer.__init__(self, groups, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params, [param.grad for param in params])
        return loss

    @abstractmethod
    def _update(self, group: Group, params: Tensors, grads: Tensors) -> None:
        """Update the parameters of a group."""

    def _states(self, params: Tensors, make: Callable[[Tensor], dict[str, Any]]) -> Sequence[Any]:
        """Return the state of each parameter; `make` makes one that is not there."""
        for param in params:
            if not self.state[param]:
                if param.grad is not None and param.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients. Make the embedding "
                        f"dense (sparse=False), or use SGD."
                    )
                self.state[param] = make(param)
        return [self.state[param] for param in params]


def zeros_like(param: Tensor) -> Tensor:
    """Return zeros in the memory layout of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def shrink(params: Tensors, lr: float | Tensor, weight_decay: float) -> None:
    """Let parameters decay beside their update, in place."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)


def descend(params: Tensors, updates: Tensors, lr: float | Tensor) -> None:
    """Subtract `lr * updates` from parameters, in place; the updates are of no use afterwards."""
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-lr)
