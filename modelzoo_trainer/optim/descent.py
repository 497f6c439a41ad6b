"""Gradient descent with and without rates of each parameter's own."""

from __future__ import annotations

import torch
from torch import nn

from modelzoo_trainer.optim.arguments import Params, groups_of, one_lr
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
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("SGD", lr, learning_rate, 1e-3),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )


class ASGD(torch.optim.ASGD):
    """Averaged stochastic gradient descent; lr is 0.01 if none is given."""

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
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("ASGD", lr, learning_rate, 0.01),
            lambd=lambd,
            alpha=alpha,
            t0=t0,
            weight_decay=weight_decay,
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
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("Adagrad", lr, learning_rate, 0.01),
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
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("Adadelta", lr, learning_rate, 1.0),
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
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("RMSprop", lr, learning_rate, 0.01),
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
        )


class Rprop(torch.optim.Rprop):
    """Rates from the signs of gradients; lr is 1e-3 if none is given."""

    def __init__(  # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        super().__init__(
            groups_of(model, None, params),
            lr=one_lr("Rprop", lr, learning_rate, 1e-3),
            etas=etas,
            step_sizes=step_sizes,
        )
