"""In-place arithmetic on a device that records it, at a twentieth of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_METHODS: Final = (
    *("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "pow", "maximum", "minimum"),
    *("sqrt", "rsqrt", "neg", "reciprocal", "abs", "exp", "sign", "clamp", "clamp_min"),
    *("clamp_max", "addmm", "sigmoid", "tanh"),
)
_OPERATORS: Final = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}


class OutOfPlace(TorchFunctionMode):
    """Computes what is done in place beside, and copies it there: x.mul_(y) -> x.copy_(x * y).

    The graph is the same, and so is the memory that the result is in. But for what is done in
    place torch works out shapes by Python functions, which takes the host some 200 us for an
    `addcmul_`, and 10 us this way.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, or the one that does the same beside."""
        kwargs = kwargs or {}
        beside = _BESIDE.get(func)
        if beside is not None:
            target = args[0]
            return target.copy_(beside(*args, **kwargs))
        beside = _LISTS_BESIDE.get(func)
        if beside is not None:
            for target, result in zip(args[0], beside(*args, **kwargs), strict=True):
                target.copy_(result)
            return None
        return func(*args, **kwargs)


def _beside() -> dict[Any, Any]:
    known = {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in _METHODS
        if hasattr(Tensor, f"{name}_")
    }
    return known | {getattr(Tensor, name): getattr(Tensor, of) for name, of in _OPERATORS.items()}


def _lists_beside() -> dict[Any, Any]:
    return {
        getattr(torch, f"_foreach_{name}_"): getattr(torch, f"_foreach_{name}")
        for name in _METHODS
        if hasattr(torch, f"_foreach_{name}_")
    }


_BESIDE: Final = _beside()
_LISTS_BESIDE: Final = _lists_beside()
