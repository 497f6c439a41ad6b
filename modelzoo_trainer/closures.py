"""Step closures: code that needs a value on the host, called when the value is there."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

from modelzoo_trainer.errors import HookError

P = ParamSpec("P")


def step_closure(function: Callable[P, None]) -> Callable[P, None]:
    """Make a function run later, with the tensors among its arguments as host values.

    Calls run in the order they were made, each once, with `trainer.global_step` as it was (or,
    inside a step, will be counted) then. A tensor without dimensions becomes a number, another
    one a CPU tensor; values are those at the time of the call.

    Args:
        function: Has a parameter called `trainer`. Its result is not used.

    Returns:
        A function with the same parameters that returns at once.

    Raises:
        HookError: If there is no such parameter.
    """
    names = list(inspect.signature(function).parameters)
    if "trainer" not in names:
        raise HookError(
            f"step_closure: {function.__qualname__} takes ({', '.join(names)}); one parameter "
            f"must be called 'trainer'."
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
    """Stands for the tensor with this index until its value is there."""

    def __init__(self, index: int) -> None:
        self.index = index

    @classmethod
    def take(cls, tensor: Tensor, tensors: list[Tensor]) -> "_Slot":
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
