"""Step closures: functions called later, with values that a step has computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from torch import Tensor

from modelzoo_trainer.errors import HookError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

# Per process, not per thread: backward hooks run in threads of autograd.
_ACTIVE: Final[list[Trainer]] = []


@contextmanager
def active(trainer: Trainer) -> Iterator[None]:
    """Context manager in which `active_trainer` returns this trainer.

    Args:
        trainer: The trainer whose run begins.
    """
    _ACTIVE.append(trainer)
    try:
        yield
    finally:
        begun_last = next(idx for idx in reversed(range(len(_ACTIVE))) if _ACTIVE[idx] is trainer)
        del _ACTIVE[begun_last]


def active_trainer() -> Trainer | None:
    """Return the trainer of the innermost active run, or None."""
    return _ACTIVE[-1] if _ACTIVE else None


def is_recorded(trainer: Trainer) -> bool:
    """Return whether what is logged now is used: on log steps, and where those are rehearsed."""
    return trainer.is_log_step or (trainer.rehearses and trainer.should_run_optimizer_step)


def snapshot(tensor: Tensor) -> Tensor:
    """Return a copy, unaffected by later in-place operations."""
    return tensor.detach().clone()


P = ParamSpec("P")


def step_closure(function: Callable[P, None]) -> Callable[P, None]:
    """Make a function run later, with the tensors among its arguments as host values.

    Calls run once each, in order, with the `trainer.global_step` at the time of the call (inside a
    step: at its end). Scalar tensors become numbers, other ones CPU tensors, with the values
    at the time of the call.

    Args:
        function: Has a parameter named `trainer`. Its result is ignored.

    Returns:
        A function with the same parameters that returns at once.

    Raises:
        HookError: If there is no such parameter.
    """
    names = list(inspect.signature(function).parameters)
    if "trainer" not in names:
        raise HookError(
            f"step_closure: {function.__qualname__} takes ({', '.join(names)}); one parameter "
            f"must be named 'trainer'."
        )
    place = names.index("trainer")

    @functools.wraps(function)
    def later(*args: P.args, **kwargs: P.kwargs) -> None:
        trainer: Any = kwargs["trainer"] if "trainer" in kwargs else args[place]
        tensors: list[Tensor] = []
        planned = _replace((args, kwargs), lambda tensor: _Slot.take(tensor, tensors))

        def deliver(values: list[Any]) -> None:
            final_args, final_kwargs = _replace(planned, lambda slot: values[slot.index], _Slot)
            function(*final_args, **final_kwargs)

        trainer.read(tensors, deliver)

    return later


class _Slot:
    """Placeholder for the tensor with this index until its value is read."""

    def __init__(self, index: int) -> None:
        self.index = index

    @classmethod
    def take(cls, tensor: Tensor, tensors: list[Tensor]) -> _Slot:
        tensors.append(tensor)
        return cls(len(tensors) - 1)


def _replace(tree: Any, function: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return plain tuples, lists and dicts with each object of `kind` replaced."""
    if isinstance(tree, kind):
        return function(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)(_replace(item, function, kind) for item in tree)
    if type(tree) is dict:
        return {key: _replace(value, function, kind) for key, value in tree.items()}
    return tree
