"""What the constructors of all optimizers share.

The first argument is the model, whose parameters are grouped by `make_param_groups`; or, as in
torch, parameters or groups that are taken as they are. `lr` and `learning_rate` are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from modelzoo_trainer.constraints import Fraction, NonNegativeFloat, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.param_groups import ParamFilter, make_param_groups

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Betas = tuple[Fraction, Fraction]
Factors = dict[str, float]

if TYPE_CHECKING:
    _Optimizer = Optimizer
else:
    _Optimizer = object  # the one of torch's that comes next in a class


@checked_dataclass
class OverModel(_Optimizer):
    """Makes an optimizer of torch's one over the parameters of a model.

    Its fields, and those of a subclass, are the arguments of the constructor, and the keys of a
    YAML section; they become settings of the parameter groups, and no attributes.
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
    """Return what a torch optimizer takes as its first argument.

    `weight_decay`: None if the optimizer knows none.

    Raises:
        ConfigError: If there are filters or factors and no model to apply them to.
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
        raise ConfigError("params: filters need a model, and the optimizer was given parameters.")
    if adjust_learning_rate:
        raise ConfigError(
            "adjust_learning_rate: groups need a model, and the optimizer was given parameters."
        )
    return model


def one_lr(owner: str, lr: float | None, learning_rate: float | None, default: float) -> float:
    """Return the learning rate under either of its names.

    Raises:
        ConfigError: If both are given and differ.
    """
    if lr is not None and learning_rate is not None and lr != learning_rate:
        raise ConfigError(
            f"{owner} got lr={lr} and learning_rate={learning_rate}, which are two names of one "
            f"setting. Keep one."
        )
    given = learning_rate if lr is None else lr
    return default if given is None else given
