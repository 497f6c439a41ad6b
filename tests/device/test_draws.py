"""Initial values that each rank draws for its own part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backends.draws import Seeds, fill, truncated
from backends.recorded import Recorded, Unrecorded, repeat, truncated_normal_

Function = Callable[[Tensor], object]


def of_part(function: Function, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
    """Return what a function fills into a part of a tensor, NaN elsewhere."""
    target = nn.Parameter(torch.empty(shape, device="meta"))
    record = Recorded.of(target)
    with torch.no_grad():
        function(record)
    own = torch.full([one.stop - one.start for one in part], torch.nan)
    repeat(record.operations, own, part, Seeds(3, "weight"))
    return own


def in_parts(function: Function, shape: tuple[int, ...], dim: int, num: int) -> Tensor:
    """Return a tensor that `num` ranks fill, divided along a dimension."""
    size = -(-shape[dim] // num)
    parts = []
    for start in range(0, num * size, size):
        part = [slice(0, length) for length in shape]
        part[dim] = slice(min(start, shape[dim]), min(start + size, shape[dim]))
        parts.append(of_part(function, shape, tuple(part)))
    return torch.cat(parts, dim)


def thirds(weight: Tensor) -> None:
    for one in weight.chunk(3):
        nn.init.xavier_uniform_(one)
    weight.data.mul_(0.5)
    weight[2:4].copy_(torch.arange(weight.shape[1], dtype=torch.float32))


def with_padding(weight: Tensor) -> None:
    nn.init.normal_(weight)
    weight[3].fill_(0)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda one: nn.init.normal_(one, 1.0, 0.02), (300, 2100)),
        (lambda one: truncated_normal_(one, 0.0, 0.02, -0.04, 0.04), (5, 300, 1100)),
        (lambda one: nn.init.kaiming_uniform_(one, a=math.sqrt(5)), (64, 32, 3, 3)),
        (thirds, (9, 5)),
        (with_padding, (10, 4)),
        (nn.init.ones_, (7, 3)),
    ],
    ids=["normal", "truncated", "kernels", "thirds", "padding", "ones"],
)
def test_parts_have_the_values_of_the_whole(function: Function, shape: tuple[int, ...]) -> None:
    whole = of_part(function, shape, tuple(slice(0, size) for size in shape))
    assert not whole.isnan().any()
    for dim in range(len(shape)):
        for num in (2, 3, 7):
            assert torch.equal(in_parts(function, shape, dim, num), whole), (dim, num)


def test_slices_are_filled_like_by_torch() -> None:
    whole = of_part(thirds, (9, 5), (slice(0, 9), slice(0, 5)))
    assert whole[2:4].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    bound = 0.5 * math.sqrt(6 / (3 + 5))
    others = torch.cat((whole[:2], whole[4:]))
    assert others.abs().max() <= bound
    assert len(set(others.flatten().tolist())) == others.numel()


@pytest.mark.parametrize(
    "function",
    [nn.init.orthogonal_, nn.init.trunc_normal_, lambda one: one[0].fill_(one.sum())],
    ids=["orthogonal", "torch's loop", "reads"],
)
def test_what_computes_with_a_tensor_is_not_recorded(function: Function) -> None:
    with pytest.raises(Unrecorded):
        of_part(function, (4, 4), (slice(0, 4), slice(0, 4)))


@pytest.mark.parametrize("bounds", [(-0.04, 0.04), (-0.01, 0.08), (0.03, 0.2)])
def test_a_truncated_distribution_is_that_of_torch(bounds: tuple[float, float]) -> None:
    shape = torch.Size((1000, 1000))
    own = torch.empty(shape)
    part = (slice(0, 1000), slice(0, 1000))
    fill(own, part, shape, Seeds(1, "a"), truncated(0.01, 0.02, *bounds))
    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.empty(shape), 0.01, 0.02, *bounds)
    points = torch.linspace(0.01, 0.99, 25)
    found, wanted = (torch.quantile(one.flatten()[: 10**6], points) for one in (own, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
    assert bounds[0] <= own.min()
    assert own.max() <= bounds[1]


def test_names_runs_and_repeated_draws_have_other_values() -> None:
    def draw(seeds: Seeds) -> Tensor:
        own = torch.empty(8)
        fill(
            own, (slice(0, 8),), own.shape, seeds, lambda tile, given: tile.normal_(generator=given)
        )
        return own

    first = draw(Seeds(1, "a"))
    assert torch.equal(draw(Seeds(1, "a")), first)
    for other in (Seeds(1, "b"), Seeds(2, "a")):
        assert not torch.isclose(draw(other), first).any()

    rows = of_part(
        lambda one: [nn.init.normal_(one[0]), nn.init.normal_(one[1])],
        (2, 8),
        (slice(0, 2), slice(0, 8)),
    )
    assert not torch.isclose(rows[0], rows[1]).any()


def test_other_dtypes_are_drawn_in_single_precision() -> None:
    shape = torch.Size((50, 50))
    part = (slice(0, 50), slice(0, 50))

    def draw(dtype: torch.dtype) -> Tensor:
        own = torch.empty(shape, dtype=dtype)
        fill(own, part, shape, Seeds(1, "a"), lambda tile, given: tile.normal_(generator=given))
        return own

    assert torch.equal(draw(torch.bfloat16), draw(torch.float32).bfloat16())
