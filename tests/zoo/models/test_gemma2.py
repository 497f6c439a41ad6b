"""Settings of Gemma-2: inner dimension, softcaps, sandwich norms, windows in every other layer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.gpt2 import Gpt2Settings
from tests.zoo.models.decoder_cases import GEMMA2, NO_DROPOUT, SIZES
from tests.zoo.models.formulas import attended, normed, projected

IDS = torch.arange(24).view(2, 12) * 7 % 51


def make(**changes: Any) -> Gpt2:
    torch.manual_seed(0)
    model = Gpt2(**{**SIZES, **NO_DROPOUT, **changes}).double()
    for name, param in model.named_parameters():  # far enough from the start that each one counts
        torch.nn.init.normal_(param, mean=float("norm.weight" in name), std=0.3)
    return model


def test_the_model_is_the_formula() -> None:
    model = make(**GEMMA2, attention_logits_alpha=0.9)
    hidden = functional.embedding(IDS, model.token_embeddings.weight) * 32**0.5
    for index, module in enumerate(model.layers):
        layer: Any = module
        window = 4 if index % 2 else None  # the first layer sees everything
        found = attended(
            normed(hidden, layer.attention_norm, 1e-6),
            layer.attention,
            groups=2,
            dim=6,
            head_dim=6,
            factor=0.9 * 6**-0.5,
            softcap=2.0,
            window=window,
        )
        hidden = hidden + normed(found, layer.attention_post_norm, 1e-6)
        inputs = normed(hidden, layer.ffn_norm, 1e-6)
        gate = projected(inputs, layer.ffn.gate_proj)
        wide = projected(inputs, layer.ffn.up_proj) * gate * (1 + torch.erf(gate / 2**0.5)) / 2
        narrow = projected(wide, layer.ffn.down_proj)
        hidden = hidden + normed(narrow, layer.ffn_post_norm, 1e-6)
    states = normed(hidden, model.final_norm, 1e-6)
    expected = 3 * torch.tanh(states @ model.token_embeddings.weight.T / 3)

    assert model.lm_head.weight is model.token_embeddings.weight
    torch.testing.assert_close(model.logits(IDS), expected, rtol=1e-6, atol=1e-6)  # float32 angles


def test_heads_may_be_wider_or_narrower_than_their_share_of_the_states() -> None:
    attention: Any = make(attention_inner_dim=48).layers[0].attention

    assert attention.q_proj.weight.shape == (48, 32)
    assert attention.o_proj.weight.shape == (32, 48)
    assert attention.scale == pytest.approx(12**-0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_inner_dim": 30}, r"attention_inner_dim \(30\) is not a multiple of num_heads"),
        (
            {"attention_inner_dim": 48, "rotary_dim": 6, "position_embedding_type": "rotary"},
            r"rotary_dim is 6; .* at most 4 \(attention_inner_dim / num_heads\)",
        ),
        ({"attention_logit_softcapping": 0.0}, "attention_logit_softcapping: .* > 0 .*got 0.0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: .* > 0 .*got -1.0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gpt2Settings(**settings)


def test_an_unset_rotary_dim_is_a_quarter_of_the_share_of_the_states() -> None:
    settings = Gpt2Settings(position_embedding_type="rotary", attention_inner_dim=1536)

    assert settings.turning_dim == 16  # of 64, although a head has 128


def test_branches_are_normalized_after_dropout() -> None:
    model = make(norm_first_sandwich=True, dropout_rate=0.5)
    layer: Any = model.layers[0]
    seen: list[Tensor] = []
    for norm in (layer.attention_post_norm, layer.ffn_post_norm):
        norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))

    model.logits(IDS)

    shares = [(one == 0).double().mean().item() for one in seen]
    assert shares == pytest.approx([0.5, 0.5], abs=0.1)


def test_the_first_position_may_have_a_later_row_of_the_table() -> None:
    model, plain = make(position_embedding_offset=2), make()
    state = model.state_dict()
    assert state["position_embeddings.weight"].shape == (14, 32)
    plain.load_state_dict(
        {**state, "position_embeddings.weight": state["position_embeddings.weight"][2:]}
    )

    assert torch.equal(model.logits(IDS), plain.logits(IDS))
    given = torch.arange(12).expand(2, -1)
    assert torch.equal(model.logits(IDS, position_ids=given + 2), plain.logits(IDS))


def test_an_offset_without_a_table_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"position_embedding_offset \(2\) has no effect without"):
        make(position_embedding_offset=2, position_embedding_type="rotary", rotary_dim=4)
