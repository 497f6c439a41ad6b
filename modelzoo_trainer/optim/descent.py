"""Gradient descent with and without rates of each parameter's own."""

from __future__ import annotations

import torch
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.arguments import Factors, Params, groups_of, one_lr
from modelzoo_trainer.optim.checks import check_fractions, check_not_negative, check_pair
from modelzoo_trainer.optim.param_groups import ParamFilter


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
