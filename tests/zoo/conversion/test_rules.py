"""Rules make the tensors of either side from those of the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.conversion.rules import (
    Copy,
    Fused,
    InterleavedRows,
    Offset,
    Rule,
    Stacked,
    Transposed,
)

RULES: dict[str, tuple[Rule, list[tuple[int, ...]]]] = {
    "copy": (Copy("a", "b"), [(3, 2)]),
    "transposed": (Transposed("a", "b"), [(3, 2)]),
    "transposed bias": (Transposed("a", "b"), [(3,)]),
    "interleaved": (InterleavedRows("a", "b", head_dim=6, rotary_dim=4), [(12, 3)]),
    "interleaved bias": (InterleavedRows("a", "b", head_dim=6, rotary_dim=4), [(12,)]),
    "fused": (Fused(("a", "b"), "c", [(0, 2), (1, 1), (0, 2)]), [(4, 3), (1, 3)]),
    "fused bias": (Fused(("a", "b"), "c", [(1, 1), (0, 4)], is_transposed=True), [(4,), (1,)]),
    "fused conv1d": (
        Fused(("a", "b"), "c", [(0, 2), (1, 1), (0, 2)], is_transposed=True),
        [(4, 3), (1, 3)],
    ),
    "stacked": (Stacked("a", ("b", "c")), [(2, 3, 4)]),
}


def made(rule: Rule, ours: list[Tensor]) -> list[Tensor]:
    return list(rule.to_theirs(lambda number: ours[number].clone()))


@pytest.mark.parametrize(("rule", "shapes"), RULES.values(), ids=RULES)
def test_there_and_back_gives_the_same_bits(rule: Rule, shapes: list[tuple[int, ...]]) -> None:
    ours = [torch.randn(shape) for shape in shapes]
    theirs = made(rule, ours)
    assert [tuple(one.shape) for one in theirs] == [*rule.their_shapes(shapes)]
    assert all(one.is_contiguous() for one in theirs)
    assert (len(rule.ours), len(rule.theirs)) == (len(ours), len(theirs))
    back = list(rule.to_ours(lambda number: theirs[number], shapes))
    assert all(torch.equal(one, other) for one, other in zip(ours, back, strict=True))


def test_rotated_rows_are_interleaved_there() -> None:
    rule = InterleavedRows("a", "b", head_dim=5, rotary_dim=4)
    (found,) = made(rule, [torch.arange(10)])
    assert found.tolist() == [0, 2, 1, 3, 4, 5, 7, 6, 8, 9]


def test_blocks_of_rows_lie_in_the_order_given() -> None:
    rule = Fused(("a", "b"), "c", [(0, 1), (1, 2), (0, 1)])
    (found,) = made(rule, [torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert found.tolist() == [1, 3, 4, 2]


def test_an_offset_is_added_in_float32() -> None:
    theirs = torch.tensor([0.001], dtype=torch.bfloat16)
    (ours,) = Offset("a", "b").to_ours(lambda number: theirs, [(1,)])
    assert ours.item() == pytest.approx(1 + theirs.item(), abs=1e-7)
    (back,) = made(Offset("a", "b"), [ours])
    assert back.item() == pytest.approx(theirs.item(), abs=1e-7)
