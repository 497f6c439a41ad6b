"""Products of rows with the matrix of their group, by every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from backends import grouped_products
from backends.blocks import checkpoint_activations
from backends.grouped_products import grouped_linear, moved_rows
from backends.sync_guard import SyncGuard

INPUTS, OUTPUTS = 8, 12
SIZES = {
    "mixed": [3, 0, 5, 1],
    "first and last are empty": [0, 4, 0],
    "all in one": [0, 7, 0, 0],
    "one group": [6],
    "fewer rows than groups": [0, 1, 0, 1, 0],
    "equal": [4, 4, 4],
    "no rows": [0, 0],
}
HAS_KERNEL = hasattr(functional, "grouped_mm")
WAYS = ["loop", "blocks", *(["kernel"] if HAS_KERNEL else [])]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose one of the implementations; torch's kernel has a version for the host."""
    torch.manual_seed(0)
    monkeypatch.setattr(grouped_products, "_is_on_host", lambda _: request.param == "loop")
    monkeypatch.setattr(grouped_products, "_has_kernel", lambda *_: request.param == "kernel")
    return str(request.param)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def explicit(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    parts = rows.split(sizes)
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weights, strict=True)])


def operands(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rows = torch.randn(sum(sizes), INPUTS, dtype=dtype, requires_grad=True)
    return rows, torch.randn(len(sizes), OUTPUTS, INPUTS, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_are_those_of_each_group(way: str, name: str) -> None:
    sizes = SIZES[name]
    if way == "kernel" and not sum(sizes):
        sizes = [*sizes, 1]
    rows, weights = operands(sizes)
    factors = torch.randn(sum(sizes), OUTPUTS)

    found = grouped_linear(rows, weights, ends_of(sizes))
    gradients = torch.autograd.grad(found, (rows, weights), factors)

    expected = explicit(rows, weights, sizes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, (rows, weights), factors), rtol=1e-5, atol=1e-5
    )


def test_gradients_may_be_expanded(way: str) -> None:
    rows, weights = operands([3, 0, 5])

    found = grouped_linear(rows, weights, ends_of([3, 0, 5]))
    gradients = torch.autograd.grad(found.sum(), (rows, weights))

    expected = explicit(rows, weights, [3, 0, 5]).sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (rows, weights)))


@pytest.mark.parametrize("way", ["loop", "blocks"], indirect=True)
def test_second_derivatives(way: str) -> None:
    sizes = [3, 0, 2]
    rows, weights = operands(sizes, torch.float64)
    ends = ends_of(sizes)

    def call(rows: Tensor, weights: Tensor) -> Tensor:
        return grouped_linear(rows, weights, ends)

    assert torch.autograd.gradcheck(call, (rows, weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (rows, weights), fast_mode=True)


def test_products_in_bfloat16(way: str) -> None:
    sizes = [3, 0, 5, 1]
    rows, weights = operands(sizes, torch.bfloat16)

    found = grouped_linear(rows, weights, ends_of(sizes))

    assert found.dtype == torch.bfloat16
    expected = explicit(rows.float(), weights.float(), sizes).bfloat16()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_nothing_is_read(way: str) -> None:
    rows, weights = operands([3, 0, 5])
    guard = SyncGuard()

    guard.arm()
    try:
        found = grouped_linear(rows, weights, ends_of([3, 0, 5]))
        found.square().sum().backward()
    finally:
        guard.disarm()

    assert guard.num_refused == 0


def test_blocks_have_at_most_twice_the_rows() -> None:
    for sizes in ([250, 250, 250, 250], [1000, 0, 0, 0], [997, 1, 1, 1]):
        blocks = grouped_products._Blocks(1000, ends_of(sizes))
        size = blocks.of(torch.ones(1000, 1)).shape[:2].numel()
        assert 1000 <= size <= 2000


def test_rows_are_moved_and_their_gradients_are_moved_back() -> None:
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    places = torch.randperm(10)
    origins = places.argsort()

    def call(rows: Tensor) -> Tensor:
        return moved_rows(rows, places, origins, 2)

    assert torch.equal(call(rows), rows.repeat_interleave(2, dim=0)[places])
    assert torch.equal(moved_rows(call(rows), origins, places, 1)[::2], rows)
    assert torch.autograd.gradcheck(call, (rows,))
    assert torch.autograd.gradgradcheck(call, (rows,))


def test_operations_are_counted_on_fake_tensors_as_on_others() -> None:
    def count(make: Callable[[], tuple[Tensor, Tensor]]) -> int:
        with FlopCounterMode(display=False) as counter:
            rows, weights = make()
            grouped_linear(rows, weights, ends_of([3, 0, 5])).square().sum().backward()
        assert rows.grad is not None
        return int(counter.get_total_flops())

    with FakeTensorMode():
        planned = count(lambda: operands([3, 0, 5]))

    assert planned == count(lambda: operands([3, 0, 5])) == 3 * 2 * 8 * INPUTS * OUTPUTS


class Grouped(nn.Module):
    """A block with a grouped product and a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, INPUTS, INPUTS))

    def forward(self, rows: Tensor) -> Tensor:
        return grouped_linear(rows, self.weights, ends_of([3, 0, 5])).sin().cos()


@pytest.mark.parametrize(("mode", "num_products"), [("selective", 3), ("full", 4)])
def test_selective_recomputation_keeps_grouped_products(mode: Any, num_products: int) -> None:
    model = nn.Sequential(nn.ModuleList([Grouped()]))
    checkpoint_activations(model, mode)

    with FlopCounterMode(display=False) as counter:
        model[0][0](torch.randn(8, INPUTS, requires_grad=True)).sum().backward()

    assert counter.get_total_flops() == num_products * 2 * 8 * INPUTS * INPUTS


@pytest.mark.slow
def test_the_operators_keep_torch_s_rules() -> None:
    rows, weights = operands([3, 0, 5])
    ends, places = ends_of([3, 0, 5]), torch.randperm(8)

    torch.library.opcheck(torch.ops.modelzoo_trainer.grouped_linear, (rows, weights, ends))
    torch.library.opcheck(
        torch.ops.modelzoo_trainer.grouped_outer, (torch.randn(8, OUTPUTS), rows, ends)
    )
    torch.library.opcheck(
        torch.ops.modelzoo_trainer.moved_rows, (rows, places, places.argsort(), 1)
    )


@pytest.mark.skipif(not HAS_KERNEL, reason="this torch has no grouped_mm")
@pytest.mark.parametrize(
    ("capability", "dtype", "inputs", "is_kernel"),
    [
        ((9, 0), torch.bfloat16, 16, True),
        ((10, 0), torch.bfloat16, 16, True),
        ((8, 0), torch.bfloat16, 16, False),
        ((12, 0), torch.bfloat16, 16, False),
        ((9, 0), torch.float16, 16, False),
        ((9, 0), torch.bfloat16, 12, False),
    ],
)
def test_grouped_mm_is_used_on_cuda_where_it_reads_no_size_on_the_host(
    capability: tuple[int, int],
    dtype: torch.dtype,
    inputs: int,
    is_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        rows = torch.empty(32, inputs, dtype=dtype, device="cuda")
    assert grouped_products._has_kernel(rows, (inputs, 24)) == is_kernel
