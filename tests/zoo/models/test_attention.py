"""Attention: grouped heads, and comparison with the formula."""

from typing import Any

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.attention import Attention
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.visible import Visible

PLAIN = Context(angles=None, visible=(Visible(), Visible()))


def make(**changes: Any) -> Attention:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_heads": 4, "attention_dropout_rate": 0.0}
    return Attention(DecoderSettings(**{**sizes, **changes})).double()


def grouped(num_groups: int) -> Attention:
    return make(
        attention_module="multiquery_attention",
        extra_attention_params={"num_kv_groups": num_groups},
    )


def states() -> Tensor:
    return torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(attention: Attention, hidden: Tensor) -> Tensor:
    queries, keys, values = (
        projection(hidden).view(2, 7, 4, 6).permute(0, 2, 1, 3)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    scores = queries @ keys.transpose(-1, -2) * attention.scale
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    joined = (weights @ values).permute(0, 2, 1, 3).reshape(2, 7, 24)
    result: Tensor = attention.o_proj(joined)
    return result


def test_attention_is_the_formula() -> None:
    attention = make()

    torch.testing.assert_close(attention(states(), PLAIN), by_hand(attention, states()))


def test_unscaled_attention_is_the_formula_without_a_scale() -> None:
    attention = make(attention_type="dot_product")

    assert attention.scale == 1
    torch.testing.assert_close(attention(states(), PLAIN), by_hand(attention, states()))


def test_as_many_groups_as_heads_is_ordinary_attention() -> None:
    ordinary, as_many = make(), grouped(4)
    as_many.load_state_dict(ordinary.state_dict())

    assert torch.equal(as_many(states(), PLAIN), ordinary(states(), PLAIN))


def test_a_group_shares_its_keys_and_values_among_its_heads() -> None:
    shared, ordinary = grouped(2), make()
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        by_group = weights[name].unflatten(0, (2, 6))
        weights[name] = by_group.repeat_interleave(2, dim=0).flatten(0, 1)
    ordinary.load_state_dict(weights)

    torch.testing.assert_close(shared(states(), PLAIN), ordinary(states(), PLAIN))


def test_multiquery_attention_has_one_group_by_default() -> None:
    attention = make(attention_module="multiquery_attention")

    assert attention.k_proj.weight.shape == (6, 24)
    assert attention(states(), PLAIN).shape == (2, 7, 24)
