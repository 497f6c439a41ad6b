"""The boundary around what a checkpoint restores: content of a wrong kind is a CheckpointError."""

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

from modelzoo_trainer.errors import CheckpointError, ModelZooError

_OF_CONTENT: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OWN: Final = frozenset({"backends", "modelzoo_trainer", "torch"})
_LIBRARIES: Final = _OWN | {"numpy"} | sys.stdlib_module_names
_HOOKS: Final = ("load_state_dict", "on_load_checkpoint", "on_train_ready")


@contextmanager
def restoring(path: Path | None, parts: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error that the content of a checkpoint causes into a `CheckpointError`.

    An error that comes through code of the user's keeps its type: it is a mistake there.

    Raises:
        CheckpointError: With the original error as its cause.
    """
    try:
        yield
    except _OF_CONTENT as error:
        if isinstance(error, ModelZooError) or _is_of_user(error):
            raise
        part = _part_of(error, parts)
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be restored: what it has for {part} is not what was "
            f"written ({type(error).__name__}: {error}). Choose another checkpoint, and make a "
            f"new trainer: this one is restored in part."
        ) from error


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_of_user(error: BaseException) -> bool:
    """Return whether an error came through code that is neither this package's nor a library's."""
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
    """Return an entry that counts something.

    `default`: at most one: what is returned if there is no entry; may be None, which then fits.

    Raises:
        ValueError: If it is not a whole number, or negative.
        KeyError: If it is not there, and there is no default.
    """
    value = state.get(key, default[0]) if default else state[key]
    if value is None and default == (None,):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


# ---- what optimizers and schedulers have taken as it was


def kinds(state: Any) -> dict[str, Any]:
    """Return the kind of each entry of a state, for `check_kinds`; none if it is no mapping."""
    return {key: _kind(value) for key, value in state.items()} if isinstance(state, Mapping) else {}


def check_kinds(owner: Any, before: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Check that what was loaded is of the kinds that were there before.

    `owner`: whose state it is; only of torch's classes and this package's is it known.

    Raises:
        ValueError: If something is missing, or of another kind.
    """
    if type(owner).__module__.partition(".")[0] not in _OWN:
        return
    for key, kind in before.items():
        found = _kind(state[key]) if key in state else "nothing"
        may_be_unset = kind == "bool" and found == "null"  # as a choice that is torch's to make
        if kind in ("null", "other") or may_be_unset:
            continue
        if found != kind:
            raise ValueError(f"{key} is {state.get(key)!r}, which is of another kind")


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
    """Check what an optimizer has loaded.

    Raises:
        ValueError: If a setting is of another kind; or if parameters of a group have states with
            other entries, or with entries of other kinds.
    """
    for group, known in zip(optimizer.param_groups, before, strict=True):
        check_kinds(optimizer, known, group)
        first: dict[int, dict[str, Any]] = {}  # what is kept depends on the number of dimensions
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                other = first.setdefault(param.dim(), state)
                check_kinds(optimizer, kinds(other), state)
                check_kinds(optimizer, kinds(state), other)


def check_steps(state: Mapping[str, Any]) -> None:
    """Check the numbers of steps in an optimizer's state, as it is in a checkpoint.

    Raises:
        ValueError: If one is negative.
    """
    for entries in state["state"].values():
        step = entries.get("step", 0)
        if isinstance(step, (int, float)) and step < 0:
            raise ValueError(f"step is {step}, not a number of steps")


def parts_of(core: Mapping[str, Any], stateful: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the callbacks of a trainer by the names that messages have for them."""
    return dict(chain(core.items(), ((f"callbacks.{name}", owner) for name, owner in stateful)))
