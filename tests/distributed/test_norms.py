"""Norms and limits of gradients that are shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from backends.cpu import CpuBackend
from backends.norms import Norms
from backends.parallel.norms import ShardedNorms
from tests.distributed.ranks import run_ranks

NORMS = ShardedNorms(CpuBackend())


def whole_grads(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 4), (3,), (1, 2), (7, 4), (2, 2))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def with_grad(grad: Tensor) -> Parameter:
    param = Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def mixed_params(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """Return plain ones and such on two meshes: sharded unevenly, partly empty, whole."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    first, second, third, fourth, fifth = whole_grads(dtype)
    grads = [
        distribute_tensor(first, line, [Shard(0)]),
        second,
        distribute_tensor(third, line, [Shard(0)]),
        distribute_tensor(fourth, square, [Replicate(), Shard(1)]),
        distribute_tensor(fifth, square, [Shard(0), Shard(1)]),
    ]
    return [*map(with_grad, grads), Parameter(torch.zeros(2))]


def together(params: list[Parameter]) -> list[list[float]]:
    grads = (param.grad for param in params if param.grad is not None)
    return [
        (grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten().tolist()
        for grad in grads
    ]


def clip_mixed(rank: int, max_norm: float) -> dict[str, Any]:
    dist.init_process_group("gloo")
    params = mixed_params()
    with CommDebugMode() as count:
        norm = NORMS.grad_norm(params)
    before = NORMS.clip_grad_norm(params, max_norm)
    assert type(norm) is Tensor
    assert type(before) is Tensor
    return {
        "norms": (norm.item(), before.item()),
        "grads": together(params),
        "num_collectives": count.get_total_counts(),
    }


@pytest.mark.slow_cases("0.1", "100.0")
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_the_norm_is_that_of_whole_gradients(max_norm: float) -> None:
    expected = [with_grad(grad) for grad in whole_grads()]
    norm = torch.nn.utils.clip_grad_norm_(expected, max_norm).item()

    found = run_ranks(4, clip_mixed, max_norm)

    assert found[0]["norms"] == pytest.approx((norm, norm), rel=1e-14)
    for mine, whole in zip(found[0]["grads"], together(expected), strict=True):
        assert mine == pytest.approx(whole, rel=1e-14)
    assert found == [found[0]] * 4
    assert found[0]["num_collectives"] == 1 + 1 + 2  # for each group, each of its axes


def clip_narrow(rank: int) -> tuple[str, float, float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    grad = torch.full((4,), 300.0, dtype=torch.float16)
    params = [with_grad(distribute_tensor(grad, mesh, [Shard(0)]))]
    norm = NORMS.clip_grad_norm(params, 60.0)
    return str(norm.dtype), norm.item(), together(params)[0][0]


def test_a_norm_in_half_precision_does_not_overflow() -> None:
    assert run_ranks(2, clip_narrow) == [("torch.float32", 600.0, 30.0)] * 2


def clip_values(rank: int) -> list[list[float]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.tensor([3.0, 0.5, -3.0]), mesh, [Shard(0)])
    plain = torch.tensor([-0.5, 2.0])
    params = [with_grad(sharded), with_grad(plain), Parameter(torch.zeros(2))]
    NORMS.clip_grad_value(params, 1.0)
    return together(params)


def test_values_are_limited() -> None:
    assert run_ranks(2, clip_values) == [[[1.0, 0.5, -1.0], [-0.5, 1.0]]] * 2


def sum_first(rank: int) -> tuple[float, list[list[float]]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.tensor([1.5, 2.0]), mesh, [Partial()])
    params = [with_grad(part)]
    norm = NORMS.grad_norm(params).item()
    NORMS.clip_grad_value(params, 3.5)
    return norm, together(params)


@pytest.mark.slow
def test_gradients_that_are_not_added_up_yet_are() -> None:
    assert run_ranks(2, sum_first) == [(5.0, [[3.0, 3.5]])] * 2


def test_plain_gradients_are_clipped_as_torch_does() -> None:
    mine, theirs = ([with_grad(grad) for grad in whole_grads(torch.float32)] for _ in range(2))
    assert torch.equal(NORMS.clip_grad_norm(mine, 0.1), torch.nn.utils.clip_grad_norm_(theirs, 0.1))
    assert together(mine) == together(theirs)


def test_without_gradients_the_norm_is_zero() -> None:
    assert NORMS.grad_norm([]).item() == 0
    assert NORMS.grad_norm([Parameter(torch.ones(2))]).item() == 0


@pytest.mark.parametrize("norms", [NORMS, CpuBackend().norms], ids=["sharded", "whole"])
def test_norms_of_whole_tensors_are_wide_enough(norms: Norms) -> None:
    given = [
        torch.full((4,), 6e4, dtype=torch.float16),
        torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True),
        torch.full((4,), 3 + 4j, dtype=torch.complex64),
        torch.ones(4).to(torch.float8_e5m2),
    ]
    found = norms.tensor_norms(given)
    assert [norm.item() for norm in found] == pytest.approx([119_936.0, 6.0, 10.0, 2.0], rel=1e-3)
    assert [norm.dtype for norm in found] == [torch.float32, torch.float64] + [torch.float32] * 2
    assert not any(norm.requires_grad for norm in found)
    [one, two] = norms.tensor_norms([torch.ones(9), torch.zeros(2)])
    assert (one.item(), two.item()) == (3.0, 0.0)
