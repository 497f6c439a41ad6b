"""Adam and its kin, with the defaults of the Cerebras Model Zoo."""

from __future__ import annotations

import torch
from torch import nn

from modelzoo_trainer.optim.arguments import (
    Betas,
    Params,
    check_correct_bias,
    groups_of,
    one_lr,
)
from modelzoo_trainer.optim.param_groups import ParamFilter


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        check_correct_bias("AdamW", correct_bias)
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("AdamW", lr, learning_rate, 1e-3),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class Adam(torch.optim.Adam):
    """Adam, whose weight decay is added to the gradient; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        check_correct_bias("Adam", correct_bias)
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("Adam", lr, learning_rate, 1e-3),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class Adamax(torch.optim.Adamax):
    """Adam with the infinity norm; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        maximize: bool = False,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("Adamax", lr, learning_rate, 1e-3),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )


class NAdam(torch.optim.NAdam):
    """Adam with Nesterov's momentum; lr is 2e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("NAdam", lr, learning_rate, 2e-3),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
        )


class RAdam(torch.optim.RAdam):
    """Adam with a rectified adaptive rate; lr is 1e-3 if none is given."""

    def __init__(  # noqa: PLR0913 # the keys of its YAML section
        self,
        model: nn.Module | Params,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        learning_rate: float | None = None,
        params: list[ParamFilter] | None = None,
    ) -> None:
        super().__init__(
            groups_of(model, weight_decay, params),
            lr=one_lr("RAdam", lr, learning_rate, 1e-3),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
