"""Settings, parameter names and shapes of optimizers, to compare a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.errors import OF_ANOTHER_RUN, ONLY_MODEL, CheckpointMismatch

Settings = list[dict[str, Any]]
Names = list[list[str]]

_MOST: Final = 8  # differences in a message
_PLAIN: Final = (bool, int, float, str, type(None))
_KERNELS: Final = ("capturable", "differentiable", "foreach", "fused")  # no effect on the result
# The number of parameter-sized tensors in the state, given the group.
_NUM_LIKE_PARAMETER: Final[Mapping[str, Callable[[Mapping[str, Any]], int]]] = {
    "ASGD": lambda group: 1,
    "Adadelta": lambda group: 2,
    "Adafactor": lambda group: group.get("beta1") is not None,
    "Adagrad": lambda group: 1,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": lambda group: 2,
    "Lamb": lambda group: 2,
    "Lion": lambda group: 1,
    "Muon": lambda group: 1 if group.get("use_muon", True) else 2,  # AdamW for the rest
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda group: 2,
    "SGD": lambda group: bool(group.get("momentum")),
}
_LIKE_PARAMETER: Final = (  # state entries with the parameter's shape
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("acc_delta", "grad_avg", "sum", "prev", "ax"),
)


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the plain settings of each parameter group."""
    known = optimizer.defaults.keys() - set(_KERNELS)
    return [
        {key: value for key, value in group.items() if key in known and is_plain(value)}
        for group in optimizer.param_groups
    ]


def bytes_to_come(optimizer: Optimizer) -> int:
    """Return about how many bytes of state an optimizer adds at its first step.

    0 for unknown classes.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    count = next((_NUM_LIKE_PARAMETER[name] for name in names if name in _NUM_LIKE_PARAMETER), None)
    if count is None:
        return 0
    return sum(
        count(group) * param.nbytes
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and not is_lazy(param) and not optimizer.state.get(param)
    )


def is_plain(value: Any) -> bool:
    """Return whether a setting is a number, a string, a bool, None, or several of them."""
    if isinstance(value, list | tuple):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def names_of(model: Module, optimizer: Optimizer) -> Names | None:
    """Return the parameter names of each group; None if one does not belong to the model."""
    parameters = dict(model.named_parameters())
    names = {id(parameters[own]): name for name, own in bare_names(parameters).items()}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(id(param) not in names for params in groups for param in params):
        return None
    return [[names[id(param)] for param in params] for params in groups]


def changes(now: Settings, before: Settings, scheduled: Collection[str]) -> str:
    """Describe the settings that differ from a checkpoint's; empty if none does.

    Both are from set-up. `scheduled` settings are ignored.
    """
    rows = dict.fromkeys(
        f"{key} is {group[key]!r} (checkpoint: {old[key]!r})"
        for group, old in zip(now, before, strict=False)
        for key in group
        if key in old and key not in scheduled and _differ(group[key], old[key])
    )
    return ", ".join([*rows][:_MOST]) + (", ..." if len(rows) > _MOST else "")


def _differ(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return list(first) != list(second)
    return bool(first != second)


def check_names(now: Names, before: Names, whose: str = "optimizer") -> None:
    """Raise a `CheckpointMismatch` if the parameters or their order differ.

    `whose`: the optimizer's name in messages.
    """
    for group, (own, old) in enumerate(zip(now, before, strict=False)):
        for idx, (name, expected) in enumerate(zip(own, old, strict=False)):
            if name != expected:
                raise CheckpointMismatch(
                    f"{whose}.param_groups[{group}]: parameter {idx} is {name!r}, but "
                    f"{expected!r} in the checkpoint, so it would get the wrong state. Pass the "
                    f"parameters in the checkpoint's order. {OF_ANOTHER_RUN} {ONLY_MODEL}"
                )


def check_shapes(
    optimizer: Optimizer, state: Mapping[str, Any], names: Names | None, whose: str = "optimizer"
) -> None:
    """Raise a `CheckpointMismatch` if the shapes of a checkpoint's state differ.

    `whose`: the optimizer's name in messages.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    flat = [name for group in names or () for name in group] or [f"parameter {k}" for k in keys]
    for key, param, name in zip(keys, params, flat, strict=False):
        if is_lazy(param):
            continue
        for what, shape in _shapes_in(state["state"].get(key, {})):
            if shape != tuple(param.shape):
                raise CheckpointMismatch(
                    f"the checkpoint's {whose} does not fit: {what} of {name} has the shape "
                    f"{shape}, but the parameter {tuple(param.shape)}. Use the original "
                    f"model. {OF_ANOTHER_RUN} {ONLY_MODEL}"
                )


def _shapes_in(state: Mapping[str, Any]) -> Sequence[tuple[str, tuple[int, ...]]]:
    held = [(what, state.get(what)) for what in _LIKE_PARAMETER]
    return [
        (what, tuple(value.shape))
        for what, value in held
        if isinstance(value, Tensor) and value.dim() > 0
    ]
