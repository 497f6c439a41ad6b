"""Record how a module initializes a tensor, and repeat it on the part that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from .draws import Draw, Region, Seeds, fill, truncated

_HOST: Final = torch.device("cpu")
_POINTWISE: Final = frozenset(
    {"zero_", "fill_", "mul_", "add_", "sub_", "div_", "clamp_", "neg_", "abs_", "exp_", "sqrt_"}
)
_RANDOM: Final[Mapping[str, Callable[..., Draw]]] = {
    "normal_": lambda mean=0.0, std=1.0: partial(_draw, "normal_", (mean, std)),
    "uniform_": lambda start=0.0, end=1.0: partial(_draw, "uniform_", (start, end)),
}


class Unrecorded(Exception):
    """An initialization computes with a tensor instead of only filling it."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is done to a region of a tensor: one of the three."""

    region: Region
    dims: tuple[int, ...]  # those of the tensor that the operation sees
    draw: Draw | None = None
    source: Tensor | None = None  # copied
    pointwise: Callable[[Tensor], object] | None = None
    is_constant: bool = False  # whether `pointwise` ignores the former values


class Recorded(Tensor):
    """Stands for a whole tensor while a module initializes it; has no memory.

    Operations that fill it, or basic slices of it, are recorded; all others raise `Unrecorded`.
    """

    operations: list[_Operation]
    _region: Region
    _dims: tuple[int, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        operations: list[_Operation],
        region: Region,
        dims: tuple[int, ...],
    ) -> Recorded:
        """Create one for a region of a tensor of the dtype of `like`."""
        shape = [region[dim].stop - region[dim].start for dim in dims]
        own = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=_HOST)
        own.operations, own._region, own._dims = operations, region, dims
        return own

    @classmethod
    def of(cls, target: Tensor) -> Recorded:
        """Return one for a tensor; a parameter for a parameter."""
        region = tuple(slice(0, size) for size in target.shape)
        own = cls(target, [], region, tuple(range(target.dim())))
        if not isinstance(target, Parameter):
            return own
        return Parameter(own, target.requires_grad)  # type: ignore[return-value]  # both

    def record_draw(self, draw: Draw) -> None:
        """Record that random numbers are drawn."""
        self.operations.append(_Operation(self._region, self._dims, draw=draw))

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch's is untyped
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        target, *rest = args
        given = {key: value for key, value in (kwargs or {}).items() if value is not None}
        if not isinstance(target, Recorded):
            raise Unrecorded(name)
        view = _VIEWS.get(name)
        if view is not None and not given:
            return view(target, *rest)
        target._record(name, rest, given)
        return target

    def _record(self, name: str, rest: list[Any], given: dict[str, Any]) -> None:
        note = partial(_Operation, self._region, self._dims)
        if name == "copy_" and type(rest[0]) in (Tensor, Parameter):
            self.operations.append(note(source=rest[0].detach().clone()))
        elif name in _RANDOM and not given:
            self.record_draw(_RANDOM[name](*rest))
        elif name in _POINTWISE and not any(map(_is_large, (*rest, *given.values()))):
            apply = partial(_apply, name, rest, given)
            self.operations.append(note(pointwise=apply, is_constant=name in ("zero_", "fill_")))
        else:
            raise Unrecorded(name)

    def _alias(self) -> Recorded:
        return Recorded(self, self.operations, self._region, self._dims)

    def _select(self, dim: int, index: int) -> Recorded:
        first = index % self.shape[dim]
        kept = self._slice(dim, first, first + 1)
        place = self._dims[dim]
        return Recorded(
            self, self.operations, kept._region, tuple(one for one in self._dims if one != place)
        )

    def _slice(
        self, dim: int = 0, first: int | None = None, last: int | None = None, step: int = 1
    ) -> Recorded:
        start, stop, _ = slice(first, last).indices(self.shape[dim])
        if step != 1:
            raise Unrecorded("slice")
        place = self._dims[dim]
        region = list(self._region)
        begin = region[place].start
        region[place] = slice(begin + start, begin + max(start, stop))
        return Recorded(self, self.operations, tuple(region), self._dims)

    def _split(self, sizes: int | Sequence[int], dim: int = 0) -> list[Recorded]:
        length = self.shape[dim]
        if isinstance(sizes, int):
            return [
                self._slice(dim, start, start + sizes) for start in range(0, length, max(sizes, 1))
            ]
        ends = list(accumulate(sizes))
        return [self._slice(dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


_VIEWS: Final[Mapping[str, Callable[..., Any]]] = {
    "detach": Recorded._alias,
    "alias": Recorded._alias,
    "select": Recorded._select,
    "slice": Recorded._slice,
    "split": Recorded._split,
    "split_with_sizes": Recorded._split,
}


def truncated_normal_(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    """Fill a tensor like `torch.nn.init.trunc_normal_`, also a `Recorded` one."""
    if isinstance(tensor, Recorded):
        tensor.record_draw(truncated(mean, std, a, b))
    else:
        torch.nn.init.trunc_normal_(tensor, mean, std, a, b)


def needed(operations: Sequence[_Operation], shape: torch.Size) -> Sequence[_Operation]:
    """Return the operations on a tensor from the last one on that replaces all of its values."""
    whole = tuple(slice(0, size) for size in shape)
    for index in reversed(range(len(operations))):
        one = operations[index]
        if one.region == whole and (one.is_constant or one.pointwise is None):
            return operations[index:]
    return operations


def repeat(operations: Sequence[_Operation], own: Tensor, part: Region, seeds: Seeds) -> None:
    """Repeat recorded operations on a part of a tensor, in place.

    Args:
        operations: In order.
        own: The values of the part.
        part: Where it is in the tensor.
        seeds: Of the tensor's first draw; later ones have a number in their name.
    """
    num_draws = 0
    for one in operations:
        inside = tuple(
            slice(max(mine.start, region.start), min(mine.stop, region.stop))
            for mine, region in zip(part, one.region, strict=True)
        )
        values = own[_relative(inside, part)] if _is_any(inside) else None
        within = _relative(inside, one.region)
        if one.draw is not None:
            if values is not None:
                extent = torch.Size(region.stop - region.start for region in one.region)
                numbered = Seeds(seeds.run, f"{seeds.name}#{num_draws}")
                fill(values, within, extent, numbered, one.draw)
            num_draws += 1
        elif values is None:
            continue
        elif one.source is not None:
            values.copy_(_spread(one)[within])
        elif one.pointwise is not None:
            one.pointwise(values)


def _spread(one: _Operation) -> Tensor:
    """Return the source of a copy with the dimensions of the tensor."""
    assert one.source is not None
    source = one.source.expand([one.region[dim].stop - one.region[dim].start for dim in one.dims])
    for dim in range(len(one.region)):
        if dim not in one.dims:
            source = source.unsqueeze(dim)
    return source


def _relative(inside: Region, outer: Region) -> Region:
    return tuple(
        slice(one.start - of.start, one.stop - of.start)
        for one, of in zip(inside, outer, strict=True)
    )


def _is_any(inside: Region) -> bool:
    return all(one.stop > one.start for one in inside)


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.dim() > 0 or isinstance(value, Recorded))


def _apply(name: str, rest: list[Any], given: dict[str, Any], values: Tensor) -> None:
    getattr(values, name)(*rest, **given)


def _draw(name: str, rest: tuple[float, float], tile: Tensor, generator: torch.Generator) -> None:
    getattr(tile, name)(*rest, generator=generator)
