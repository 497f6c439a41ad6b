"""Turn errors caused by the content of a checkpoint into CheckpointError."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from modelzoo_trainer.errors import CheckpointError, CheckpointMismatch, ModelZooError

_OF_CONTENT: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OWN: Final = frozenset({"backends", "modelzoo_trainer", "torch"})
_LIBRARIES: Final = _OWN | {"numpy"} | sys.stdlib_module_names
_HOOKS: Final = ("load_state_dict", "on_load_checkpoint", "on_train_ready")


@contextmanager
def restoring(path: Path | None, parts: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error caused by the content of a checkpoint into a `CheckpointError`.

    Errors raised through user code keep their type: the bug is there.

    Raises:
        CheckpointError: With the original error as its cause.
    """
    try:
        yield
    except CheckpointMismatch as error:
        error.add_note(f"while loading checkpoint {str(path)!r}")
        raise
    except _OF_CONTENT as error:
        if isinstance(error, ModelZooError) or _is_of_user(error):
            raise
        part = _part_of(error, parts)
        raise CheckpointError(
            f"Checkpoint {str(path)!r} cannot be restored: its data for {part} is invalid "
            f"({type(error).__name__}: {error}). This Trainer is now partly restored. Create a new "
            f"Trainer, and use another checkpoint."
        ) from error


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_of_user(error: BaseException) -> bool:
    """Return whether an error passed through code outside this package and its libraries."""
    modules = (frame.f_globals.get("__name__", "") for frame in _frames(error.__traceback__))
    return any(str(name).partition(".")[0] not in _LIBRARIES for name in modules)


def _part_of(error: BaseException, parts: Mapping[str, Any]) -> str:
    names = {id(callback): name for name, callback in parts.items()}
    found = "the trainer"
    for frame in _frames(error.__traceback__):
        code = frame.f_code
        if code.co_name in _HOOKS and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            found = names.get(id(owner), found)
    return repr(found)


def whole_number(state: Mapping[str, Any], key: str, *default: Any) -> Any:
    """Return a non-negative integer entry of a state.

    `default`: at most one: returned if the entry is missing; may be None, which is then valid.

    Raises:
        ValueError: If it is not an integer, or negative.
        KeyError: If it is missing and there is no default.
    """
    value = state.get(key, default[0]) if default else state[key]
    if value is None and default == (None,):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} must be an integer >= 0, got {value!r}")
    return value


# ---- optimizers and schedulers, which load any state unchecked


def kinds(state: Any) -> dict[str, Any]:
    """Return the kind of each entry of a state, for `check_kinds`; empty if it is not a mapping."""
    return {key: _kind(value) for key, value in state.items()} if isinstance(state, Mapping) else {}


def check_kinds(owner: Any, before: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Check that loaded values have the kinds of the previous ones.

    `owner`: the object with the state; only classes of torch and this package are checked.

    Raises:
        ValueError: If an entry is missing or of another kind.
    """
    if type(owner).__module__.partition(".")[0] not in _OWN:
        return
    for key, kind in before.items():
        found = _kind(state[key]) if key in state else None
        may_be_unset = kind == "bool" and found == "null"  # torch's default
        if kind in ("null", "other") or may_be_unset:
            continue
        if found is None:
            raise ValueError(f"{key} is missing")
        if found != kind:
            raise ValueError(f"{key} must be of type {kind}, got {found}: {state[key]!r}")


def _kind(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, list):
        return "list" if any(_kind(item) != "number" for item in value) else "numbers"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "bool"
    if isinstance(value, Tensor):
        return "tensor" if value.dim() else "number"
    named = (((int, float), "number"), (str, "text"), (Mapping, "mapping"))
    return next((name for kind, name in named if isinstance(value, kind)), "other")


def group_kinds(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the kinds of the settings of each parameter group."""
    return [
        kinds({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def check_optimizer(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Check the loaded state of an optimizer.

    Raises:
        ValueError: If a setting is of another kind, or parameters of a group have states with
            different entries, or entries of different kinds.
    """
    for group, known in zip(optimizer.param_groups, before, strict=True):
        check_kinds(optimizer, known, group)
        first: dict[int, dict[str, Any]] = {}  # the entries depend on the number of dimensions
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                other = first.setdefault(param.dim(), state)
                check_kinds(optimizer, kinds(other), state)
                check_kinds(optimizer, kinds(state), other)


def check_steps(state: Mapping[str, Any]) -> None:
    """Check the step counts of an optimizer's state in a checkpoint.

    Raises:
        ValueError: If a step count is negative.
    """
    for entries in state["state"].values():
        step = entries.get("step", 0)
        if isinstance(step, (int, float)) and step < 0:
            raise ValueError(f"step must be >= 0, got {step}")


def parts_of(core: Mapping[str, Any], stateful: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the callbacks of a trainer by their names in messages."""
    return dict(chain(core.items(), ((f"callbacks.{name}", owner) for name, owner in stateful)))
