"""Weight decay schedules: the curves of the learning rate schedules, and custom functions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeFloat
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import cycles, decay, stepwise
from modelzoo_trainer.optim.scheduler import (
    LRScheduler,
    Tags,
    WeightDecayScheduler,
    schedule_dataclass,
)

# Argument names in learning rate schedules, and here.
_OURS: Final = {
    "initial_learning_rate": "initial_val",
    "end_learning_rate": "end_val",
    "learning_rate": "val",
    "learning_rates": "vals",
    "base_lr": "base_val",
    "max_lr": "max_val",
}


class Following(WeightDecayScheduler):
    """Base class of schedules with the values and arguments of a learning rate schedule.

    `curve`: that schedule. `without`: its arguments that this class does not have.
    """

    _kind: type[LRScheduler]
    _theirs: dict[str, str]  # argument names of the curve by those of this class
    _curve: LRScheduler

    def __init_subclass__(cls, curve: Any = None, without: Collection[str] = ()) -> None:
        super().__init_subclass__()
        if curve is None:
            return
        kept = [one for one in fields(curve) if one.init and one.name not in without]
        own = {_OURS.get(one.name, one.name): one for one in kept}
        cls._kind, cls._theirs = curve, {name: one.name for name, one in own.items()}
        cls.__annotations__ = {name: one.type for name, one in own.items()}
        for name, one in own.items():
            if one.default is not MISSING:
                setattr(cls, name, one.default)
        schedule_dataclass(cls)

    if TYPE_CHECKING:  # a subclass has the arguments of its curve

        def __init__(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None: ...

    @override
    def __post_init__(self) -> None:
        given = {theirs: getattr(self, name) for name, theirs in self._theirs.items()}
        try:
            self._curve = self._kind(**given | {"optimizer": None, "param_group_tags": None})
        except ConfigError as error:
            words = str(error).replace(self._kind.__name__, self._name)
            for before, after in _OURS.items():
                words = words.replace(f".{before} ", f".{after} ")
            raise ConfigError(words) from None
        self.total_iters = self._curve.total_iters
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        return self._curve.value(step)


class ConstantWD(Following, curve=decay.ConstantLR):
    """Constant weight decay; `total_iters` is its length in a sequence."""


class LinearWD(Following, curve=decay.LinearLR, without=("cycle",)):
    """Linear change from the initial to the end value, then the end value."""


class CosineDecayWD(Following, curve=decay.CosineDecayLR):
    """Cosine decay from the initial to the end value, then the end value."""


class PolynomialWD(Following, curve=decay.PolynomialLR):
    """Weight decay as in `PolynomialLR`."""


class ExponentialWD(Following, curve=decay.ExponentialLR):
    """Weight decay as in `ExponentialLR`."""


class InverseExponentialTimeDecayWD(Following, curve=decay.InverseExponentialTimeDecayLR):
    """Weight decay as in `InverseExponentialTimeDecayLR`."""


class InverseSquareRootDecayWD(Following, curve=decay.InverseSquareRootDecayLR):
    """Weight decay as in `InverseSquareRootDecayLR`."""


class StepWD(Following, curve=stepwise.StepLR):
    """Weight decay as in `StepLR`."""


class MultiStepWD(Following, curve=stepwise.MultiStepLR):
    """Weight decay as in `MultiStepLR`."""


class PiecewiseConstantWD(Following, curve=stepwise.PiecewiseConstantLR):
    """Weight decay as in `PiecewiseConstantLR`."""


class MultiplicativeWD(Following, curve=stepwise.MultiplicativeLR):
    """Weight decay as in `MultiplicativeLR`."""


class CosineAnnealingWD(Following, curve=cycles.CosineAnnealingLR):
    """Weight decay as in `CosineAnnealingLR`."""


class OneCycleWD(Following, curve=cycles.OneCycleLR):
    """Weight decay as in `OneCycleLR`."""


class CosineAnnealingWarmRestartsWD(Following, curve=cycles.CosineAnnealingWarmRestarts):
    """Weight decay as in `CosineAnnealingWarmRestarts`."""


class CyclicWD(Following, curve=cycles.CyclicLR):
    """Weight decay as in `CyclicLR`."""


@schedule_dataclass
class LambdaWD(stepwise.OfFunction, WeightDecayScheduler):
    """The initial weight decay times a function of the step.

    Args:
        optimizer: Optimizer whose parameter groups are updated.
        initial_val: Weight decay that the function is multiplied by.
        val_lambda: The function, `step -> factor`, or its dotted path; None if a subclass defines
            `factor`.
        param_group_tags: Update only groups with one of these tags.

    Raises:
        ConfigError: If there is no function, or there are two.
    """

    optimizer: Optimizer | None
    initial_val: NonNegativeFloat
    val_lambda: str | Callable[[int], float] | None = None
    param_group_tags: Tags = None

    @override
    def __post_init__(self) -> None:
        self._take("val_lambda", self.val_lambda)
        super().__post_init__()

    @override
    def value(self, step: int) -> float:
        return float(self.initial_val * self.factor(step))
