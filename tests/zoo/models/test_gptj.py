"""The GPT-J class: its settings, its layer against the formula, its tied and untied norms."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models import model_class
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, GptJ
from modelzoo_trainer.zoo.models.gptj import GptJSettings
from tests.zoo.models.formulas import attended, normed, projected

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "max_position_embeddings": 12,
    "num_hidden_layers": 2,
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "num_heads": 4,
    "filter_size": 64,
}
GROUPED = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
IDS = torch.arange(24).view(2, 12) * 7 % 50


def make(**changes: Any) -> GptJ:
    torch.manual_seed(0)
    model = GptJ(**{**SIZES, **changes}).double()
    for name, param in model.named_parameters():  # far enough from the start that each one counts
        torch.nn.init.normal_(param, mean=float("norm.weight" in name), std=0.3)
    return model


@pytest.mark.parametrize(
    ("changes", "groups", "dim"),
    [
        ({"rotary_dim": 4, "use_ffn_bias": True, "use_projection_bias_in_attention": False}, 4, 4),
        ({"use_untied_layer_norm": True}, 4, 2),  # a quarter of 8
        ({"use_untied_layer_norm": True, "rotary_dim": 8, **GROUPED}, 2, 8),
        ({"position_embedding_type": None}, 4, None),
    ],
    ids=["gptj", "gpt-neox", "falcon", "no positions"],
)
def test_the_model_is_the_formula(changes: dict[str, Any], groups: int, dim: int | None) -> None:
    model = make(**changes, share_embedding_weights=False, use_bias_in_output=True)
    states = functional.embedding(IDS, model.token_embeddings.weight)
    for module in model.layers:
        layer: Any = module
        inputs = normed(states, layer.attention_norm)
        added = attended(inputs, layer.attention, groups=groups, dim=dim)
        if changes.get("use_untied_layer_norm"):
            inputs = normed(states, layer.ffn_norm)
        wide = projected(inputs, layer.ffn.up_proj)
        wide = wide * (1 + torch.erf(wide / 2**0.5)) / 2
        states = states + added + projected(wide, layer.ffn.down_proj)
    expected = projected(normed(states, model.final_norm), model.lm_head)

    torch.testing.assert_close(model.logits(IDS), expected, rtol=1e-6, atol=1e-6)  # float32 angles


def test_a_shared_norm_is_one_and_every_parameter_gets_a_gradient() -> None:
    tied, untied = make(), make(use_untied_layer_norm=True)
    for model in (tied, untied):
        model({"input_ids": IDS, "labels": IDS})["loss"].backward()
        assert [name for name, param in model.named_parameters() if param.grad is None] == []

    more = {name for name, _ in untied.named_parameters()} - dict(tied.named_parameters()).keys()
    assert more == {f"layers.{i}.ffn_norm.{part}" for i in (0, 1) for part in ("weight", "bias")}


def test_each_branch_has_a_dropout_of_its_own() -> None:
    model = make(dropout_rate=0.5)
    layer: Any = model.layers[0]
    seen: list[Tensor] = []
    layer.dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))

    model.logits(IDS)

    attention, ffn = seen
    assert not torch.equal(attention == 0, ffn == 0)


@pytest.mark.parametrize("name", ["gptj", "gpt-neox", "falcon"])
def test_the_names_are_one_class(name: str) -> None:
    assert model_class(name) is GptJ


def test_settings_that_the_class_lacks_are_unknown() -> None:
    with pytest.raises(ConfigError, match="embedding_layer_norm"):
        GptJ(**SIZES, embedding_layer_norm=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="use_untied_layer_norm"):
        Gpt2(use_untied_layer_norm=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("residual_dropout_rate", "dropout_rate", 0.25),
        ("embd_pdrop", "embedding_dropout_rate", 0.25),
        ("attention_initializer", "initializer", "zeros"),
    ],
)
def test_a_setting_has_two_names(alias: str, name: str, value: Any) -> None:
    assert getattr(GptJSettings(**{alias: value}), name) == value
    default = getattr(GptJSettings(), name)
    given = {alias: value, name: value if default is None else default}
    with pytest.raises(ConfigError, match=f"{alias} and {name} are both given"):
        GptJ.check_arguments(**given)


def test_a_scaling_of_positions_that_the_class_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="pos_scaling_type is 'llama3'"):
        GptJ.check_arguments(pos_scaling_type="llama3", pos_scaling_factor=8.0)


def test_alibi_which_the_class_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="position_embedding_type is 'alibi'"):
        GptJ.check_arguments(position_embedding_type="alibi")


def test_sinks_without_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_sink_tokens \(4\) requires .*window_length"):
        GptJ.check_arguments(attention_sink_tokens=4)
