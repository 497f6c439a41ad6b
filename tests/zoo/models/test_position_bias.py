"""ALiBi, relative buckets, fixed positions: published values; initialization; dtypes."""

import math

import pytest
import torch

from modelzoo_trainer.zoo.models.position_bias import (
    AlibiBias,
    RelativeBias,
    alibi_slopes,
    fixed_positions,
    relative_buckets,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_heads", "powers"),
    [
        (1, [8]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_the_slopes_are_the_published_ones(num_heads: int, powers: list[float]) -> None:
    assert alibi_slopes(num_heads) == pytest.approx([2.0**-power for power in powers])


def test_alibi_falls_with_the_distance() -> None:
    bias = AlibiBias(2, scaling_factor=2.0)(3, CPU)

    assert bias.dtype == torch.float32
    assert bias.tolist() == [[0, -(2.0**-5), -(2.0**-4)], [0, -(2.0**-9), -(2.0**-8)]]


def test_two_sided_alibi_falls_in_both_directions() -> None:
    bias = AlibiBias(1, two_sided=True)(3, CPU)

    assert bias.tolist() == [[-(2.0**-7), -(2.0**-8), 0, -(2.0**-8), -(2.0**-7)]]


def test_fixed_slopes_have_no_gradient_and_trained_ones_start_at_random() -> None:
    torch.manual_seed(0)
    fixed, trained = AlibiBias(4), AlibiBias(4, trainable=True)

    assert fixed.slopes.weight.shape == trained.slopes.weight.shape == (4, 1)
    assert not fixed.slopes.weight.requires_grad
    assert trained.slopes.weight.requires_grad
    limit = math.sqrt(6 / (4 + 1))  # of xavier_uniform
    assert 0.1 < trained.slopes.weight.abs().max() < limit


def test_alibi_is_exact_in_bfloat16_and_under_autocast() -> None:
    module = AlibiBias(8)
    expected = module(600, CPU)

    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = module(600, CPU)
    with torch.no_grad():
        half = module.bfloat16()(600, CPU)

    assert torch.equal(under_autocast, expected)
    assert torch.equal(half, expected)  # slopes of eight heads are powers of two


def test_the_buckets_of_t5() -> None:
    distances = torch.tensor([0, 1, 15, 16, 18, 19, 31, 32, 64, 113, 127, 128, 5000])

    # Half of 32 buckets are exact; from there on they grow to 128 in 16 steps.
    expected = [0, 1, 15, 16, 16, 17, 21, 21, 26, 31, 31, 31, 31]
    assert relative_buckets(distances, 32).tolist() == expected


def test_the_relative_bias_is_the_table_at_the_bucket_of_the_distance() -> None:
    torch.manual_seed(0)
    module = RelativeBias(3)
    bias = module(200, CPU)

    table = module.buckets.weight
    assert table.shape == (32, 3)
    assert bias.shape == (3, 200)
    for distance, bucket in ((0, 0), (3, 3), (16, 16), (199, 31)):
        assert torch.equal(bias[:, distance], table[bucket])


def test_fixed_positions_are_the_formula() -> None:
    found = fixed_positions(torch.tensor([[0, 3], [5, 3]]), 7)

    assert found.shape == (2, 2, 7)
    frequencies = [1.0, 10000.0**-0.5, 10000.0**-1]
    waves = [wave(3 * rate) for rate in frequencies for wave in (math.sin, math.cos)]
    assert found[0, 1].tolist() == pytest.approx([*waves, 0.0], abs=1e-6)
    assert torch.equal(found[0, 1], found[1, 1])
    assert found[0, 0].tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_trained_slopes_that_are_frozen_are_reset_to_random_ones() -> None:
    bias = AlibiBias(4, trainable=True).requires_grad_(False)
    torch.manual_seed(1)
    bias.reset_parameters()
    torch.manual_seed(1)

    assert torch.equal(bias.slopes.weight, torch.nn.init.xavier_uniform_(torch.empty(4, 1)))


@pytest.mark.parametrize("module", [AlibiBias(4), AlibiBias(4, trainable=True), RelativeBias(4)])
def test_a_module_from_meta_starts_like_one_built_in_place(module: torch.nn.Module) -> None:
    moved = module.to("meta").to_empty(device="cpu")
    torch.manual_seed(1)
    moved.reset_parameters()
    torch.manual_seed(1)
    (weight,) = moved.parameters()
    start = torch.empty(weight.shape)
    if isinstance(moved, AlibiBias) and not weight.requires_grad:
        start = torch.tensor(alibi_slopes(4))[:, None]
    else:
        torch.nn.init.xavier_uniform_(start)

    assert torch.equal(weight, start)


@pytest.mark.slow
def test_buckets_and_slopes_are_those_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(300)
    for num_buckets in (8, 32, 64):
        theirs = T5Attention._relative_position_bucket(
            -distances, bidirectional=False, num_buckets=num_buckets, max_distance=128
        )
        assert torch.equal(relative_buckets(distances, num_buckets), theirs)
    for num_heads in (1, 6, 16, 40, 71):
        theirs = build_alibi_tensor(torch.ones(1, 9), num_heads, torch.float32)
        ours = AlibiBias(num_heads)(9, CPU).flip(1)
        torch.testing.assert_close(ours - ours[:, :1], theirs[:, 0])
