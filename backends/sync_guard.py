"""A guard that raises on host reads, detected by the functions that cause them."""

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

# Functions and methods that wait for a device for any arguments.
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
    """Raise where torch reads a value on the host, between `arm` and `disarm`.

    Detects calls from Python, not those inside compiled or C++ functions. It cannot tell a host
    tensor from one that stands for a device tensor, unless the device has its own type.

    `kind`: only reads of tensors on devices of this type are refused; None = of all tensors.
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
                f"{_name(func)} reads the value of a tensor inside the step, at {_caller()}, "
                f"which blocks until the device is done. Use trainer.log_metrics, trainer.read, "
                f"@step_closure or torch.where (instead of an if), or read it after the step."
            )
        return func(*args, **kwargs)

    def _is_meant(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        if self._kind is None:
            return True
        # For x[index], the index is read, not x.
        looked_at = args[1:2] if func.__name__ in ("__getitem__", "__setitem__") else args
        return any(
            item.device.type == self._kind
            for arg in (*looked_at, *kwargs.values())
            for item in (arg if isinstance(arg, (tuple, list)) else (arg,))
            if isinstance(item, Tensor)
        )

    def arm(self) -> None:
        """Start raising."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def disarm(self) -> None:
        """Stop raising."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # untyped in torch

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs without the guard."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
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
        """Allow reads inside the block, for the backend itself."""
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
    # By name only: x.to(y.device) is allowed, and that device is the host here.
    return any(isinstance(arg, str) and arg == "cpu" for arg in (*args[1:], *kwargs.values()))


def _one_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) + len(kwargs) == 1


def _reading_index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(_is_mask(item) or _is_number(item) for item in _index(args))


def _reading_assignment(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    index = _index(args)
    if any(map(_is_number, index)):
        return True
    # A single value is filled in without knowing the number of positions.
    value = args[2]
    return isinstance(value, Tensor) and value.numel() != 1 and any(map(_is_mask, index))


def _index(args: Sequence[Any]) -> Sequence[Any]:
    return args[1] if isinstance(args[1], (tuple, list)) else (args[1],)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _is_number(item: Any) -> bool:
    # As an index, torch reads its value like a Python number.
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
