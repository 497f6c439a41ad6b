"""Common arguments of the optimizers, and the step of those that torch does not have.

The first argument is the model, whose parameters are grouped by `make_param_groups`, or, as in
torch, parameters or parameter groups, which are used unchanged. `lr` and `learning_rate` are
aliases.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, NonNegativeFloat, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.param_groups import ParamFilter, make_param_groups
from modelzoo_trainer.optim.scheduler import Group

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Betas = tuple[Fraction, Fraction]
Factors = dict[str, float]

if TYPE_CHECKING:
    _Optimizer = Optimizer
else:
    _Optimizer = object  # the torch class that follows in the bases


@checked_dataclass
class OverModel(_Optimizer):
    """Make an optimizer of torch accept a model.

    Its fields, also in a subclass, are the arguments of the constructor and the keys of a YAML
    section; they become settings of the parameter groups, not attributes.

    Args:
        model: The model whose parameters are updated.
        lr: Learning rate, default 1e-3.
        learning_rate: Alias of `lr`.
        params: Filters that tag parameters.
        adjust_learning_rate: Factors on the learning rate of the model's adjustment groups.
    """

    default_lr: ClassVar[float] = 1e-3
    model: nn.Module | Params
    lr: NonNegativeFloat | None = None
    learning_rate: NonNegativeFloat | None = field(default=None, kw_only=True)
    params: list[ParamFilter] | None = field(default=None, kw_only=True)
    adjust_learning_rate: Factors | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._build(**{one.name: vars(self).pop(one.name) for one in fields(self)})

    def _build(
        self,
        *,
        model: nn.Module | Params,
        lr: float | None,
        learning_rate: float | None,
        params: list[ParamFilter] | None,
        adjust_learning_rate: Factors | None,
        **settings: Any,
    ) -> None:
        lr = one_lr(type(self).__name__, lr, learning_rate, self.default_lr)
        decay = settings.get("weight_decay")
        groups = groups_of(model, lr, decay, params, adjust_learning_rate)
        self._begin(groups, {"lr": lr, **settings})

    def _begin(self, groups: Any, defaults: dict[str, Any]) -> None:
        super().__init__(groups, **defaults)


def groups_of(
    model: nn.Module | Params,
    lr: float | None,
    weight_decay: float | None,
    params: Sequence[ParamFilter] | None,
    adjust_learning_rate: Mapping[str, float] | None,
) -> Any:
    """Return the first argument for a torch optimizer.

    `weight_decay`: None if the optimizer has none.

    Raises:
        ConfigError: If there are filters or factors but no model to apply them to.
    """
    if isinstance(model, nn.Module):
        return make_param_groups(
            model,
            weight_decay=weight_decay,
            params=params,
            lr=lr,
            adjust_learning_rate=adjust_learning_rate,
        )
    if params is not None:
        raise ConfigError(
            "params: filters need a model, but the optimizer was created from parameters. Pass "
            "the model instead."
        )
    if adjust_learning_rate:
        raise ConfigError(
            "adjust_learning_rate: groups need a model, but the optimizer was created from "
            "parameters. Pass the model instead."
        )
    return model


def one_lr(owner: str, lr: float | None, learning_rate: float | None, default: float) -> float:
    """Return the learning rate, given under either of its names.

    Raises:
        ConfigError: If both are given and differ.
    """
    if lr is not None and learning_rate is not None and lr != learning_rate:
        raise ConfigError(
            f"{owner} got lr={lr} and learning_rate={learning_rate}, which are the same setting. "
            f"Pass only one of them."
        )
    given = learning_rate if lr is None else lr
    return default if given is None else given


Tensors = list[Tensor]


class GroupOptimizer(OverModel, Optimizer):
    """Base class of optimizers that update the parameters of a group together.

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

    @abstractmethod
    def first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Return the state of a parameter before its first update; {} for none.

        Also called with a meta tensor, to learn the size of the state.

        Args:
            param: The parameter.
            group: Its parameter group.
        """

    def _states(self, params: Tensors, group: Group) -> Sequence[Any]:
        """Return the state of each parameter, a missing one from `first_state`."""
        for param in params:
            if not self.state[param]:
                if param.grad is not None and param.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients. Make the "
                        f"embedding dense (sparse=False), or use SGD."
                    )
                self.state[param] = self.first_state(param, group)
        return [self.state[param] for param in params]


def zeros_like(param: Tensor) -> Tensor:
    """Return zeros in the memory layout of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def shrink(params: Tensors, lr: float | Tensor, weight_decay: float) -> None:
    """Apply decoupled weight decay to parameters, in place."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)


def descend(params: Tensors, updates: Tensors, lr: float | Tensor) -> None:
    """Subtract `lr * updates` from parameters, in place; `updates` may be overwritten."""
    if isinstance(lr, Tensor):
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_add_(params, updates, alpha=-lr)
