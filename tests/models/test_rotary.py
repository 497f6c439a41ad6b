"""Rotary positions: dependence on distances only; scaling."""

import math

import torch
from torch import Tensor

from modelzoo_trainer.models.rotary import Rotary, rotate


def product(rotary: Rotary, query: Tensor, key: Tensor, place: int, other: int) -> Tensor:
    angles = rotary.angles(torch.arange(64))
    turned_query = rotate(query.expand(64, -1), *angles)[place]
    turned_key = rotate(key.expand(64, -1), *angles)[other]
    return turned_query @ turned_key


def test_the_product_of_query_and_key_depends_on_their_distance_only() -> None:
    rotary = Rotary(rotary_dim=8, theta=10000.0)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(8, generator=generator), torch.randn(8, generator=generator)

    near = product(rotary, query, key, 9, 4)
    moved = product(rotary, query, key, 59, 54)
    other_distance = product(rotary, query, key, 9, 3)

    torch.testing.assert_close(near, moved, rtol=1e-4, atol=1e-5)
    assert (near - other_distance).abs() > 1e-2


def test_the_first_position_does_not_turn_and_length_is_kept() -> None:
    states = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))

    turned = rotate(states, *Rotary(rotary_dim=8, theta=100.0).angles(torch.arange(5)))

    torch.testing.assert_close(turned[..., 0, :], states[..., 0, :])
    torch.testing.assert_close(turned.norm(dim=-1), states.norm(dim=-1))


def test_positions_of_rows_turn_as_the_same_positions_of_one_row() -> None:
    rotary = Rotary(rotary_dim=4, theta=100.0)
    states = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 0, 1], [7, 2, 2, 0]])

    turned = rotate(states, *rotary.angles(positions))

    each = [rotate(row, *rotary.angles(own)) for row, own in zip(states, positions, strict=True)]
    assert torch.equal(turned, torch.stack(each))


def test_dimensions_beyond_the_rotary_ones_stay() -> None:
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    turned = rotate(states, *Rotary(rotary_dim=4, theta=100.0).angles(torch.arange(5)))

    assert torch.equal(turned[:, 4:], states[:, 4:])
    assert not torch.equal(turned[1:, :4], states[1:, :4])


def test_linear_scaling_stretches_positions() -> None:
    plain = Rotary(rotary_dim=8, theta=10000.0)
    stretched = Rotary(rotary_dim=8, theta=10000.0, scaling_factor=4.0)

    torch.testing.assert_close(
        stretched.angles(torch.arange(33))[0][32], plain.angles(torch.arange(33))[0][8]
    )


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    rotary = Rotary(
        rotary_dim=128,
        theta=500000.0,
        scaling_type="llama3",
        scaling_factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_length=8192,
    )
    plain = Rotary(rotary_dim=128, theta=500000.0)

    slowed = [math.atan2(*pair) for pair in _first_turn(rotary)]
    unslowed = [math.atan2(*pair) for pair in _first_turn(plain)]

    assert math.isclose(slowed[0], unslowed[0], rel_tol=1e-5)
    assert math.isclose(slowed[63], unslowed[63] / 8, rel_tol=1e-4)
    # Dimension 33 by the published formula: wavelength 5449.6, between 8192 / 4 and 8192 / 1.
    wavelength = 2 * math.pi * 500000 ** (66 / 128)
    smooth = (8192 / wavelength - 1) / 3
    expected = ((1 - smooth) / 8 + smooth) * 2 * math.pi / wavelength
    assert 2048 < wavelength < 8192
    assert math.isclose(slowed[33], expected, rel_tol=1e-4)


def _first_turn(rotary: Rotary) -> list[tuple[float, float]]:
    cosines, sines = rotary.angles(torch.arange(2))
    return list(zip(sines[1].tolist()[:64], cosines[1].tolist()[:64], strict=True))
