"""Tensors of files of weights that are read when their values are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from modelzoo_trainer.checkpointing.lazy_weights import LazyWeights
from modelzoo_trainer.errors import CheckpointError


class LazyTensor(Tensor):
    """A tensor on the host whose values are read from a file when an operation needs them.

    Shape and dtype are known without reading. `other.copy_(tensor)` reads it and keeps nothing, so
    that a model is loaded one tensor at a time. Every other operation reads it once and keeps the
    values from then on, as an operation may change them or return a view.

    Args:
        shape: The shape.
        dtype: The dtype.
        read: Returns the values, in memory that belongs to the caller.
        read_rows: Returns the rows from the first number up to the second.
    """

    failure: CheckpointError | None
    """Why the file could not be read; `Module.load_state_dict` raises another error."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, *_: Any) -> Self:
        """Create the tensor, without memory for its values."""
        host = torch.empty(0).device
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=host)
        return made

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[], Tensor],
        read_rows: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self._read, self._read_rows = read, read_rows
        self._kept: Tensor | None = None
        self.failure = None

    def read(self) -> Tensor:
        """Return the values: those kept, or from the file."""
        if self._kept is not None:
            return self._kept
        try:
            return self._read()
        except CheckpointError as error:
            self.failure = error
            raise

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return `tensor[start:stop]`; of a safetensors file, only these rows are read."""
        if self._kept is not None or self._read_rows is None:
            return self.read()[start:stop]
        return self._read_rows(start, stop)

    def converted(self, convert: Callable[[LazyTensor], Tensor]) -> LazyTensor:
        """Return a lazy tensor of the same shape whose values are `convert(self)`."""
        return LazyTensor(tuple(self.shape), self.dtype, lambda: convert(self))

    def _keep(self) -> Tensor:
        self._kept = self.read()
        return self._kept

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.copy_ and type(args[0]) is not cls and len(args) > 1:
            return func(args[0], args[1].read(), *args[2:], **kwargs)
        return func(*tree_map(_values, args), **tree_map(_values, dict(kwargs)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the class
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_values, args), **tree_map(_values, dict(kwargs or {})))


def _values(value: Any) -> Any:
    return value._keep() if isinstance(value, LazyTensor) else value


_PROPERTIES: Final = (
    *("device", "dtype", "grad", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn"),
    *("is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xla", "is_xpu"),
    *("itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS: Final = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_signed"),
    *("nelement", "ndimension", "numel", "size", "stride", "storage_offset", "__len__"),
)
_FACTS: Final = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(Tensor, name) for name in _METHODS]
    + [torch.is_complex, torch.is_floating_point, torch.is_signed, torch.numel]
)
"""What is known without reading."""


def lazy_state(weights: LazyWeights) -> dict[str, Tensor]:
    """Return the tensors of files of weights by name, without reading them."""
    return {name: _lazy(weights, name) for name in weights.names()}


def _lazy(weights: LazyWeights, name: str) -> LazyTensor:
    return LazyTensor(
        weights.shape(name),
        weights.dtype(name),
        lambda: weights.read(name),
        lambda start, stop: weights.read_rows(name, start, stop),
    )
