"""Let an optimizer written for Python numbers compute with device tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call: TypeAlias = Callable[..., Any]
Args: TypeAlias = Sequence[Any]
Options: TypeAlias = Mapping[str, Any]

_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


class DeviceSettings(TorchFunctionMode):
    """Let an optimizer compute with settings that are tensors on the device.

    Where torch only accepts a number (`alpha`, `value`), the call is replaced by arithmetic. Python
    checks of a setting use its number, without a read: zero is treated as a small number, so that a
    schedule through zero does not change the path.

    `numbers`: the number of each setting, by the tensor's id. `keeps_counts`: `item` of another
    tensor on the device returns the tensor, for an optimizer that computes with its step count but
    does not branch on it.
    """

    def __init__(self, numbers: Mapping[int, float], *, keeps_counts: bool = False) -> None:
        super().__init__()
        self.numbers = numbers
        self.keeps_counts = keeps_counts

    def __torch_function__(
        self, func: Call, types: Sequence[type], args: Args = (), kwargs: Options | None = None
    ) -> Any:
        """Call a function, or an equivalent with tensors."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rewritten = _REWRITTEN.get(name.rstrip("_").removeprefix("_foreach_"))
        if rewritten is not None and not name.startswith("__"):
            args, kwargs = rewritten(args, kwargs)
        elif name in _MATRIX_PRODUCTS and not kwargs.keys().isdisjoint(("alpha", "beta")):
            return _matrix_product(func, args, kwargs)
        elif args and id(args[0]) in self.numbers:
            answer = _answer(name, self.numbers[id(args[0])], args[1:])
            return func(*args, **kwargs) if answer is None else answer
        elif self.keeps_counts and name == "item" and args[0].device.type != "cpu":
            return args[0].clone()
        return func(*args, **kwargs)


def _answer(name: str, number: float, others: Args) -> bool | float | None:
    """Return the result for a number, or None if a tensor must provide it."""
    if name in ("item", "__float__"):
        return number
    if name == "__bool__":
        return True
    compare = _COMPARISONS.get(name.strip("_"))
    if compare is None or len(others) != 1 or isinstance(others[0], Tensor):
        return None
    if others[0] == 0 and number == 0:
        number = 1.0
    return compare(number, others[0])


def _with_alpha(args: Args, kwargs: Options) -> tuple[Args, Options]:
    # self + alpha * other, also for lists
    alpha = kwargs.get("alpha")
    if not isinstance(alpha, Tensor):
        return args, kwargs
    rest = {key: value for key, value in kwargs.items() if key not in ("alpha", "other")}
    other = args[1] if len(args) > 1 else kwargs["other"]
    return (args[0], _scaled(other, alpha), *args[2:]), rest


def _with_value(args: Args, kwargs: Options) -> tuple[Args, Options]:
    # self + value * tensor1 * tensor2, also for lists, where it may be positional
    value = kwargs.get("value", args[3] if len(args) > 3 else None)
    if not isinstance(value, Tensor):
        return args, kwargs
    rest = {key: value for key, value in kwargs.items() if key not in ("value", "tensor1")}
    first = args[1] if len(args) > 1 else kwargs["tensor1"]
    return (args[0], _scaled(first, value), *args[2:3]), rest


def _with_weight(args: Args, kwargs: Options) -> tuple[Args, Options]:
    # self + weight * (end - self): torch requires the weight in the tensors' dtype
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if not isinstance(weight, Tensor) or weight.dim():
        return args, kwargs
    rest = {key: value for key, value in kwargs.items() if key != "weight"}
    if isinstance(args[0], Tensor):
        return (*args[:2], weight.to(args[0].dtype)), rest
    return (*args[:2], [weight.to(tensor.dtype) for tensor in args[0]]), rest


def _scaled(tensors: Any, factor: Tensor) -> Any:
    if isinstance(tensors, (list, tuple)):
        return [tensor * factor for tensor in tensors]
    return tensors * factor


_REWRITTEN: Final[dict[str, Callable[[Args, Options], tuple[Args, Options]]]] = {
    "add": _with_alpha,
    "sub": _with_alpha,
    "addcmul": _with_value,
    "addcdiv": _with_value,
    "lerp": _with_weight,
}
_MATRIX_PRODUCTS: Final = ("addmm", "addmm_")


def _matrix_product(func: Call, args: Args, kwargs: Options) -> Tensor:
    # beta * start + alpha * first @ second, which torch_xla computes on the host. As in torch's
    # kernels, nothing is rounded to a narrow dtype before the sum.
    start, first, second = args
    product = torch.mm(first.float(), second.float()) * kwargs.get("alpha", 1)
    result: Tensor = product.add(start.float() * kwargs.get("beta", 1)).to(start.dtype)
    if func.__name__ == "addmm_":
        start.copy_(result)
        return cast(Tensor, start)
    return result


class MadeOnHost(TorchFunctionMode):
    """Create tensors on the host that functions such as `zeros_like` would create on the device.

    Tensors for other devices than `device` are created there. `numbers`: the number of each tensor
    setting, by id; `made` is called with each created tensor, and returns the result.
    """

    def __init__(
        self,
        device: torch.device,
        numbers: Mapping[int, float],
        made: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.device = device
        self.numbers = numbers
        self.made = made

    def __torch_function__(
        self, func: Call, types: Sequence[type], args: Args = (), kwargs: Options | None = None
    ) -> Any:
        """Call a function, or create its result on the host."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_template = name in _BY_TEMPLATE
        if not (is_template or name in _BY_DEVICE) or not self._is_for_device(
            args[0] if is_template else None, kwargs
        ):
            return func(*args, **kwargs)
        options = {key: self._number(value) for key, value in kwargs.items()}
        options["device"] = "cpu"
        values = [self._number(value) for value in args]
        if is_template:
            # Same shape and dtype, without memory for its elements.
            values[0] = torch.empty((), dtype=args[0].dtype).expand(args[0].shape)
        return self.made(func(*values, **options))

    def _is_for_device(self, template: Tensor | None, kwargs: Options) -> bool:
        device = kwargs.get("device")
        if device is None:
            return template is not None and template.device.type == self.device.type
        return torch.device(device).type == self.device.type

    def _number(self, value: Any) -> Any:
        return self.numbers.get(id(value), value)


_BY_TEMPLATE: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"}
)
_BY_DEVICE: Final = frozenset(
    {"zeros", "ones", "full", "eye", "arange", "tensor", "as_tensor", "scalar_tensor"}
)
