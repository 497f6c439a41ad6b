"""Adam and its kin, with the defaults of the Cerebras Model Zoo."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.constraints import NonNegativeFloat, checked
from modelzoo_trainer.optim.arguments import Betas, Factors, OverModel, Params
from modelzoo_trainer.optim.param_groups import ParamFilter
from modelzoo_trainer.optim.scheduler import Group

if TYPE_CHECKING:

    class _Adam(OverModel, torch.optim.Adam):
        pass
else:
    _Adam = OverModel  # before torch's Adam or AdamW, whichever comes next in a class


class _AnyBias(_Adam):
    """Makes torch's Adam one without bias correction in groups with `correct_bias: False`.

    The correction divides a moment by 1 - beta ** step. Counting from infinity on, that is 1 in
    every form of torch's Adam (fused kernels too), and the count needs no branch.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: NonNegativeFloat | None = None,
        betas: Betas = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-6,
        weight_decay: NonNegativeFloat = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
        *,
        learning_rate: NonNegativeFloat | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        shared = lr, learning_rate, params, adjust_learning_rate
        super().__init__(
            model,
            *shared,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        _set(self, correct_bias=correct_bias)

    @override
    def _init_group(self, group: Group, params: list[Tensor], *lists: Any) -> Any:
        start = [] if group.get("correct_bias", True) else self._without_state(group)
        result = super()._init_group(group, params, *lists)  # type: ignore[no-untyped-call]  # torch's
        for param in start:
            self.state[param]["step"].fill_(inf)
        return result

    def _without_state(self, group: Group) -> list[Tensor]:
        return [one for one in group["params"] if one.grad is not None and not self.state[one]]


def _set(optimizer: Optimizer, **settings: object) -> None:
    """Add settings that the constructor of the base does not know."""
    optimizer.defaults.update(settings)
    for group in optimizer.param_groups:
        group.update({key: group.get(key, value) for key, value in settings.items()})


class AdamW(_AnyBias, torch.optim.AdamW):
    """Adam with decoupled weight decay; lr is 1e-3 if none is given."""


class Adam(_AnyBias, torch.optim.Adam):
    """Adam, whose weight decay is added to the gradient; lr is 1e-3 if none is given."""


class AdamBase(_AnyBias, torch.optim.AdamW):
    """Adam with both kinds of decay; lr is 1e-3 if none is given.

    `weight_decay` shrinks the parameters beside the update, as in AdamW;
    `l2_regularization_rate` times the parameters is added to the gradients, as in Adam, for all
    parameters, biases and norms too.
    """

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: NonNegativeFloat | None = None,
        betas: Betas = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-6,
        weight_decay: NonNegativeFloat = 0.0,
        l2_regularization_rate: NonNegativeFloat = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
        *,
        learning_rate: NonNegativeFloat | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        super().__init__(
            model,
            lr,
            betas,
            eps,
            weight_decay,
            correct_bias,
            amsgrad,
            learning_rate=learning_rate,
            params=params,
            adjust_learning_rate=adjust_learning_rate,
        )
        _set(self, l2_regularization_rate=l2_regularization_rate)

    @override
    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], *lists: Any
    ) -> Any:
        result = super()._init_group(group, params, grads, *lists)
        rate = group.get("l2_regularization_rate", 0.0)
        if rate and params:
            added = torch._foreach_mul(params, rate)
            scale = getattr(self, "grad_scale", None)
            if scale is not None:  # a fused kernel gets the gradients with the loss scale in them
                torch._foreach_mul_(added, scale)
            grads[:] = torch._foreach_add(grads, added)
        return result


class Adamax(OverModel, torch.optim.Adamax):
    """Adam with the infinity norm; lr is 1e-3 if none is given."""

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: NonNegativeFloat | None = None,
        betas: Betas = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-6,
        weight_decay: NonNegativeFloat = 0.0,
        maximize: bool = False,
        *,
        learning_rate: NonNegativeFloat | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        shared = lr, learning_rate, params, adjust_learning_rate
        super().__init__(
            model,
            *shared,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )


class NAdam(OverModel, torch.optim.NAdam):
    """Adam with Nesterov's momentum; lr is 2e-3 if none is given."""

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: NonNegativeFloat | None = None,
        betas: Betas = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
        momentum_decay: NonNegativeFloat = 4e-3,
        *,
        learning_rate: NonNegativeFloat | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        shared = lr, learning_rate, params, adjust_learning_rate
        super().__init__(
            model,
            *shared,
            default_lr=2e-3,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
        )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # As a tensor torch would put the product onto the device, and read it at every step.
        state = {
            idx: {key: float(value) if key == "mu_product" else value for key, value in own.items()}
            for idx, own in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})


class RAdam(OverModel, torch.optim.RAdam):
    """Adam with a rectified adaptive rate; lr is 1e-3 if none is given."""

    @checked()
    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: NonNegativeFloat | None = None,
        betas: Betas = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-6,
        weight_decay: NonNegativeFloat = 0.0,
        *,
        learning_rate: NonNegativeFloat | None = None,
        params: list[ParamFilter] | None = None,
        adjust_learning_rate: Factors | None = None,
    ) -> None:
        shared = lr, learning_rate, params, adjust_learning_rate
        super().__init__(
            model,
            *shared,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
