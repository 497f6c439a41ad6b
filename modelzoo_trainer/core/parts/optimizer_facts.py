"""Settings, parameter names and shapes of optimizers, to compare a resumed run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.errors import OF_ANOTHER_RUN, ONLY_MODEL, CheckpointMismatch
from modelzoo_trainer.optim.first_state import first_states

Settings = list[dict[str, Any]]
Names = list[list[str]]

_MOST: Final = 8  # differences in a message
_PLAIN: Final = (bool, int, float, str, type(None))
_KERNELS: Final = ("capturable", "differentiable", "foreach", "fused")  # no effect on the result


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the plain settings of each parameter group."""
    known = optimizer.defaults.keys() - set(_KERNELS)
    return [
        {key: value for key, value in group.items() if key in known and is_plain(value)}
        for group in optimizer.param_groups
    ]


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
    optimizer: Optimizer,
    state: Mapping[str, Any],
    names: Names | None,
    whose: str = "optimizer",
    *,
    is_alone: bool = True,
) -> None:
    """Raise a `CheckpointMismatch` if state with the shape of its parameter has another one.

    `whose`: the optimizer's name in messages. `is_alone`: whether this is the only process.
    """
    states = first_states(optimizer, is_alone=is_alone) or {}
    keys = [key for group in state["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    flat = [name for group in names or () for name in group] or [f"parameter {k}" for k in keys]
    for key, param, name in zip(keys, params, flat, strict=False):
        own = _shapes_in(states.get(param, {}))  # {} for lazy parameters
        shape = tuple(param.shape) if own else ()
        for what, saved in _shapes_in(state["state"].get(key, {})).items():
            if own.get(what) == shape != saved:
                raise CheckpointMismatch(
                    f"the checkpoint's {whose} does not fit: {what} of {name} has the shape "
                    f"{saved}, but the parameter {shape}. Use the original "
                    f"model. {OF_ANOTHER_RUN} {ONLY_MODEL}"
                )


def _shapes_in(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        what: tuple(value.shape)
        for what, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }
