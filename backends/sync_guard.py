"""A guard that finds reads of values on the host by the functions that make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name

from .errors import HostReadError

# Functions and methods that wait for a device whatever their arguments.
_ALWAYS: Final = frozenset(
    {
        *("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero"),
        *("nonzero", "argwhere", "masked_select"),
        *("unique", "unique_consecutive", "_unique2", "_unique_impl"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__"),
        *("__array__", "__dlpack__", "__repr__", "__format__"),
    }
)
_OWN: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class SyncGuard(TorchFunctionMode):
    """Raises where torch is asked for a value on the host, between `arm` and `disarm`.

    It sees calls from Python, not what a compiled or C++ function does inside, and it cannot tell
    a tensor that is meant to be on the host from one that is meant to be on the device, unless
    the device has a type of its own.

    Only reads of tensors on a device of the type `kind` are refused; None = of all.
    """

    def __init__(self, kind: str | None = None) -> None:
        super().__init__()
        self._kind = kind
        self.num_refused = 0
        self._num_pauses = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function unless it reads."""
        kwargs = kwargs or {}
        reads = not self._num_pauses and _reads(func, args, kwargs)
        if reads and self._is_meant(func, args, kwargs):
            self.num_refused += 1
            raise HostReadError(
                f"{_name(func)} reads a value on the host inside the step, at {_caller()}: a "
                f"device would be waited for. Defer it (backend.read, a step closure), do it "
                f"after the step, or keep it on the device (torch.where instead of an if)."
            )
        return func(*args, **kwargs)

    def _is_meant(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        if self._kind is None:
            return True
        # An index is what is read of x[index], not x.
        looked_at = args[1:2] if func.__name__ in ("__getitem__", "__setitem__") else args
        return any(
            item.device.type == self._kind
            for arg in (*looked_at, *kwargs.values())
            for item in (arg if isinstance(arg, (tuple, list)) else (arg,))
            if isinstance(item, Tensor)
        )

    def arm(self) -> None:
        """Begin to raise."""
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def disarm(self) -> None:
        """Cease to raise."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs as if the guard were not there."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
            if self not in modes[-1:]:
                return function(*args, **kwargs)
            self.disarm()
            try:
                return function(*args, **kwargs)
            finally:
                self.arm()

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything pass for a while: what the backend does itself."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1


def _reads(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _ALWAYS:
        return True
    check = _BY_ARGUMENTS.get(name)
    return check is not None and check(args, kwargs)


def _to_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # By name only: x.to(y.device) is fine, and here that device is the host.
    return any(isinstance(arg, str) and arg == "cpu" for arg in (*args[1:], *kwargs.values()))


def _one_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) + len(kwargs) == 1


def _reading_index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(_is_mask(item) or _is_number(item) for item in _index(args))


def _reading_assignment(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    index = _index(args)
    if any(map(_is_number, index)):
        return True
    # A single value is filled in without knowing how many places there are.
    value = args[2]
    return isinstance(value, Tensor) and value.numel() != 1 and any(map(_is_mask, index))


def _index(args: Sequence[Any]) -> Sequence[Any]:
    return args[1] if isinstance(args[1], (tuple, list)) else (args[1],)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_number(item: Any) -> bool:
    # As an index torch takes its value, as if it were a Python number.
    return (
        isinstance(item, Tensor)
        and item.dim() == 0
        and not item.is_floating_point()
        and not _is_mask(item)
    )


def _unknown_repeats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
    return isinstance(repeats, Tensor) and kwargs.get("output_size") is None


def _made_of_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    data = args[0] if args else kwargs.get("data")
    return isinstance(data, (list, tuple)) and any(isinstance(item, Tensor) for item in data)


def _unknown_classes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    num_classes: object = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    return num_classes == -1


_BY_ARGUMENTS: Final[dict[str, Callable[[Sequence[Any], Mapping[str, Any]], bool]]] = {
    "to": _to_host,
    "where": _one_argument,
    "__getitem__": _reading_index,
    "__setitem__": _reading_assignment,
    "repeat_interleave": _unknown_repeats,
    "tensor": _made_of_tensors,
    "as_tensor": _made_of_tensors,
    "one_hot": _unknown_classes,
}


def _name(func: Callable[..., Any]) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
