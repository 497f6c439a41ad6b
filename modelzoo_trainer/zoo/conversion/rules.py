"""How tensors of one layout make another layout's tensors, in both directions.

A rule connects some tensors of our model (`ours`) with some of another layout (`theirs`). It gives
their shapes from ours without reading, and makes the tensors of either side one at a time. Rows are
the first dimension of a weight, as in `nn.Linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.zoo.conversion.weights_folder import Shape

Read = Callable[[int], Tensor]
"""Reads the i-th tensor of the side that a rule converts from; all have one dtype."""


class Rule(ABC):
    """Base class: `ours` and `theirs` are the names of the tensors on each side.

    `ours_in_float32`: whether our tensors are float32 at least, whatever the dtype of theirs.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    ours_in_float32: ClassVar[bool] = False

    @abstractmethod
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of `theirs` for the shapes of `ours`."""

    @abstractmethod
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        """Yield `theirs`, in order; `read` gives `ours`."""

    @abstractmethod
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        """Yield `ours`, which have these shapes, in order; `read` gives `theirs`."""


@dataclass(frozen=True, slots=True)
class Copy(Rule):
    """The same tensor under another name."""

    our: str
    their: str
    ours: tuple[str, ...] = field(init=False)
    theirs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        _name(self)

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield read(0)

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield read(0)


@dataclass(frozen=True, slots=True)
class Transposed(Copy):
    """A matrix that is transposed there, as in `Conv1D` of GPT-2; a bias is copied."""

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0][::-1]]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield _transposed(read(0))

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield _transposed(read(0))


@dataclass(frozen=True, slots=True)
class InterleavedRows(Copy):
    """Rows of queries or keys whose rotated dimensions are interleaved pairs there.

    Here dimension k of a head is paired with k + R/2, there 2k with 2k + 1; R is `rotary_dim`. Also
    for biases, whose elements are the rows.
    """

    head_dim: int
    rotary_dim: int

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0]]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield self._permuted(read(0), self._order())

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield self._permuted(read(0), self._order().argsort())

    def _order(self) -> Tensor:
        """Return the row here of each row of a head there."""
        half = self.rotary_dim // 2
        pairs = torch.arange(self.rotary_dim).view(2, half).t().flatten()
        return torch.cat((pairs, torch.arange(self.rotary_dim, self.head_dim)))

    def _permuted(self, rows: Tensor, order: Tensor) -> Tensor:
        heads = rows.view(-1, self.head_dim, *rows.shape[1:])
        return heads.index_select(1, order).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Offset(Copy):
    """A tensor from which a number is subtracted there, such as the weight of a norm of Gemma.

    Ours is float32 at least: a sum of half precision would lose digits. Theirs are exact for values
    of ours from half of `offset` upwards; smaller ones are rounded to the precision of `offset`.
    """

    offset: float = 1.0
    ours_in_float32: ClassVar[bool] = True

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield _at_least_float32(read(0)) - self.offset

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield _at_least_float32(read(0)) + self.offset


@dataclass(frozen=True, slots=True)
class Fused(Rule):
    """Several matrices, or biases, whose rows are one tensor there.

    Args:
        ours: Such as the projections of queries, keys and values.
        their: The one tensor.
        blocks: The blocks of rows there, from the first: which of ours, and how many of its rows;
            each of ours gives its rows in order.
        is_transposed: Whether a matrix is transposed there, as in `Conv1D` of GPT-2.
    """

    ours: tuple[str, ...]
    their: str
    blocks: Sequence[tuple[int, int]]
    is_transposed: bool = False
    theirs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "theirs", (self.their,))

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return [shape[::-1] if self.is_transposed else shape]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        fused: Tensor | None = None
        for number in range(len(self.ours)):
            rows = read(number)
            if fused is None:
                num = sum(count for _, count in self.blocks)
                fused = rows.new_empty((num, *rows.shape[1:]))
            for own, there, count in self._places(number):
                fused[there : there + count] = rows[own : own + count]
        assert fused is not None
        yield _transposed(fused) if self.is_transposed else fused

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        fused = read(0)
        fused = fused.t() if self.is_transposed and fused.dim() == 2 else fused
        for number, shape in enumerate(shapes):
            rows = fused.new_empty(shape)
            for own, there, count in self._places(number):
                rows[own : own + count] = fused[there : there + count]
            yield rows

    def _places(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of one of ours: its row, the row there, the number of rows."""
        own = there = 0
        for which, count in self.blocks:
            if which == number:
                yield own, there, count
                own += count
            there += count


@dataclass(frozen=True, slots=True)
class Stacked(Rule):
    """A tensor that is several there, one for each index of its first dimension (experts)."""

    our: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ours", (self.our,))

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [shapes[0][1:]] * len(self.theirs)

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        for one in read(0):
            yield one.contiguous()

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        stacked: Tensor | None = None
        for number in range(len(self.theirs)):
            one = read(number)
            if stacked is None:
                stacked = one.new_empty(shapes[0])
            stacked[number] = one
        assert stacked is not None
        yield stacked


def linear(our: str, their: str, *, bias: bool) -> list[Rule]:
    """Return the rules that copy a projection, a norm or an embedding: its weight and its bias."""
    return [Copy(f"{our}.{name}", f"{their}.{name}") for name in _names(bias)]


def conv1d(our: str, their: str, *, bias: bool) -> list[Rule]:
    """Return the rules of a projection that is a `Conv1D` there: its weight is transposed."""
    return [Transposed(f"{our}.{name}", f"{their}.{name}") for name in _names(bias)]


def fused_qkv(
    attention: str,
    their: str,
    blocks: Sequence[tuple[int, int]],
    *,
    bias: bool,
    is_transposed: bool = False,
) -> list[Rule]:
    """Return the rules of queries, keys and values that are one projection there.

    Args:
        attention: Prefix of ours, such as "layers.0.attention".
        their: Name of the projection there, without "weight".
        blocks: As of `Fused`; 0 = queries, 1 = keys, 2 = values.
        bias: Whether there are biases.
        is_transposed: As of `Fused`.
    """
    return [
        Fused(
            tuple(f"{attention}.{one}_proj.{name}" for one in "qkv"),
            f"{their}.{name}",
            tuple(blocks),
            is_transposed=is_transposed,
        )
        for name in _names(bias)
    ]


def blocks_by_group(num_heads: int, num_groups: int, head_dim: int) -> list[tuple[int, int]]:
    """Return the blocks of rows of `fused_qkv` that are group by group: queries, a key, a value.

    With a group per head: queries, keys and values of each head. With one group: all queries, then
    the key and the value.
    """
    group = [(0, num_heads // num_groups * head_dim), (1, head_dim), (2, head_dim)]
    return group * num_groups


def _names(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds the values of all."""
    return reduce(torch.promote_types, dtypes)


def _name(rule: Copy) -> None:
    object.__setattr__(rule, "ours", (rule.our,))
    object.__setattr__(rule, "theirs", (rule.their,))


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
