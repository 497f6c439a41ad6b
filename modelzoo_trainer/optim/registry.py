"""Optimizers and schedules by their names in a configuration, case-insensitive."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from torch.optim import Optimizer

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.optim import (
    adafactor,
    adam,
    composed,
    cycles,
    decay,
    muon,
    sgd,
    stepwise,
    warmup_stable_decay,
    weight_decay,
)
from modelzoo_trainer.optim.scheduler import Scheduler

_T = TypeVar("_T")

OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            adafactor.Adafactor,
            adam.Adam,
            adam.AdamBase,
            adam.AdamW,
            adam.Adamax,
            adam.NAdam,
            adam.RAdam,
            sgd.ASGD,
            sgd.Adadelta,
            sgd.Adagrad,
            sgd.RMSprop,
            sgd.Rprop,
            sgd.SGD,
            adam.Lamb,
            adam.Lion,
            muon.Muon,
        )
    }
)
"""Name to class. The constructor is the schema of the `optimizer` section."""

SCHEDULERS: Final[Mapping[str, type[Scheduler]]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            composed.ChainedScheduler,
            composed.ChainedWD,
            composed.ScalePerParamLR,
            composed.SequentialLR,
            composed.SequentialWD,
            cycles.CosineAnnealingLR,
            cycles.CosineAnnealingWarmRestarts,
            cycles.CyclicLR,
            cycles.OneCycleLR,
            decay.ConstantLR,
            decay.CosineDecayLR,
            decay.ExponentialLR,
            decay.InverseExponentialTimeDecayLR,
            decay.InverseSquareRootDecayLR,
            decay.LinearLR,
            decay.PolynomialLR,
            stepwise.LambdaLR,
            stepwise.MultiStepLR,
            stepwise.MultiplicativeLR,
            stepwise.PiecewiseConstantLR,
            stepwise.StepLR,
            warmup_stable_decay.WarmupStableDecay,
            weight_decay.ConstantWD,
            weight_decay.CosineDecayWD,
            weight_decay.LambdaWD,
            weight_decay.LinearWD,
            weight_decay.CosineAnnealingWD,
            weight_decay.CosineAnnealingWarmRestartsWD,
            weight_decay.CyclicWD,
            weight_decay.ExponentialWD,
            weight_decay.InverseExponentialTimeDecayWD,
            weight_decay.InverseSquareRootDecayWD,
            weight_decay.MultiStepWD,
            weight_decay.MultiplicativeWD,
            weight_decay.OneCycleWD,
            weight_decay.PiecewiseConstantWD,
            weight_decay.PolynomialWD,
            weight_decay.StepWD,
        )
    }
)
"""Name to class. The constructor is the schema of an item of the `schedulers` section."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of a shipped optimizer.

    Args:
        name: A key of `OPTIMIZERS`, case-insensitive.

    Raises:
        ConfigError: If no shipped optimizer has this name.
    """
    return _find("an optimizer", name, OPTIMIZERS)


def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of a shipped schedule.

    Args:
        name: A key of `SCHEDULERS`, case-insensitive.

    Raises:
        ConfigError: If no shipped schedule has this name.
    """
    return _find("a scheduler", name, SCHEDULERS)


def _find(one: str, name: str, table: Mapping[str, _T]) -> _T:
    lowered = {known.lower(): cls for known, cls in table.items()}
    found = lowered.get(name.lower())
    if found is None:
        raise ConfigError(f"{name!r} is not {one}. {suggest(name, table)}")
    return found
