"""Rotary positions: dependence on distances only."""

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.rotary import Rotary, rotate


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
