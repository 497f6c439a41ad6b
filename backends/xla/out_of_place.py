"""In-place arithmetic on a device that records it, at a fraction of the host's time."""

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


class OutOfPlace(TorchFunctionMode):
    """Computes what is done in place beside, and puts it in its place: x.mul_(y) as x = x * y.

    The graph is the same, and so is the memory that the result is in; of a list, no two elements
    may share memory. But for what is done in
    place torch works out shapes by Python functions, which takes the host some 200 us for an
    `addcmul_`, and 25 us this way.
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
            return _fill(args[0], beside(*args, **kwargs))
        beside = _LISTS_BESIDE.get(func)
        if beside is not None:
            for target, result in zip(args[0], beside(*args, **kwargs), strict=True):
                _fill(target, result)
            return args[0]
        return func(*args, **kwargs)


def _fill(target: Tensor, result: Tensor) -> Tensor:
    if target.dtype is not result.dtype and not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if (
        target.dtype is not result.dtype
        or target.shape != result.shape
        or not torch._is_functional_tensor(target)
    ):
        return target.copy_(result)
    # What torch does after an operation in place. A `copy_` would change the value itself, which
    # a read of the time before may still have.
    before = torch._from_functional_tensor(target)
    torch._functionalize_replace(target, torch._from_functional_tensor(result))
    torch._functionalize_commit_update(target)
    torch._functionalize_sync(target)
    torch._propagate_xla_data(before, torch._from_functional_tensor(target))  # the same memory
    torch.autograd.graph.increment_version(target)
    return target


def _beside() -> dict[Any, Any]:
    return {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in _METHODS
        if hasattr(Tensor, f"{name}_")
    }


def _lists_beside() -> dict[Any, Any]:
    return {
        getattr(torch, f"_foreach_{name}_"): getattr(torch, f"_foreach_{name}")
        for name in _METHODS
        if hasattr(torch, f"_foreach_{name}_")
    }


_BESIDE: Final = _beside()
_LISTS_BESIDE: Final = _lists_beside()
