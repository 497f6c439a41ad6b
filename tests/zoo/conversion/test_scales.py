"""Factors of muP and others are multiplied into the weights of a folder of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer.checkpointing.weights import write_weights
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.engine import InMemory
from modelzoo_trainer.zoo.conversion.hugging_face import family_fitting, plan_export, plan_import
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.conversion.test_command import MODEL

MUP: dict[str, Any] = {"mup_base_hidden_size": 4, "mup_base_filter_size": 4}
FACTORS: dict[str, Any] = {"embeddings_scale": 3.3, "attention_logits_alpha": 1.7}
GPT2: dict[str, Any] = {
    key: MODEL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
} | {"filter_size": 32, "max_position_embeddings": 16}
NO_BIAS = {"use_projection_bias_in_attention": False, "use_ffn_bias_in_attention": False}
GEMMA2 = MODEL | {
    "nonlinearity": "geglu",
    "norm_first_sandwich": True,
    "embeddings_scale": 8**0.5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mup": ("llama", MODEL | MUP | FACTORS | {"output_logits_alpha": 2.5}),
    "mup, untied": ("llama", MODEL | MUP | FACTORS | {"share_embedding_weights": False}),
    "by the width": ("llama", MODEL | MUP | {"scale_qk_dot_by_d": False}),
    "still tied": (
        "llama",
        MODEL | {"embeddings_scale": 0.5, "output_logits_scale": 0.5},
    ),
    "norms of queries": (
        "llama",
        MODEL | FACTORS | {"attention_qk_norm": "rmsnorm", "output_logits_scale": 0.3},
    ),
    "biases of queries": ("llama", MODEL | FACTORS | {"use_projection_bias_in_attention": True}),
    "learned positions": ("gpt2", GPT2 | MUP | FACTORS),
    "a norm of the embedding": (
        "bloom",
        GPT2
        | FACTORS
        | {"position_embedding_type": "alibi", "embedding_layer_norm": True}
        | {"nonlinearity": "gelu_new", "output_logits_scale": 0.2},
    ),
    "a bias of the output": (
        "gptj",
        GPT2 | MUP | FACTORS | {"rotary_dim": 4, "share_embedding_weights": False} | NO_BIAS,
    ),
}


CASES["scores of gemma2"] = "gemma2", GEMMA2 | {"attention_logits_alpha": 1.234}


def made(name: str, arguments: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    model: Any = model_class(name)(**arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    if name == "bloom":  # slopes are fixed
        model.load_state_dict(
            {"position_bias.slopes.weight": type(model)(**arguments).position_bias.slopes.weight},
            strict=False,
        )
    model.eval()
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(("name", "arguments"), CASES.values(), ids=CASES)
@pytest.mark.slow_cases(every=4)
def test_logits_are_those_of_the_model_with_factors(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = made(name, arguments)
    weights, params = tmp_path / "weights.safetensors", tmp_path / "params.yaml"
    write_weights(model.state_dict(), weights)
    params.write_text(yaml.safe_dump({"model": {"name": name, **arguments}}))
    words = ["checkpoint", "convert", str(weights), str(tmp_path / "hf"), "--to", "hf"]
    assert main([*words, "--params", str(params)]) == 0
    found = plan_import(tmp_path / "hf", key="the test")
    again = found.family.model_class(**found.arguments).eval()
    state = dict(found.plan.tensors())
    if found.settings.share_embedding_weights:
        state["lm_head.weight"] = state["token_embeddings.weight"]
    again.load_state_dict(state)
    tokens = torch.randint(0, 20, (2, 9))
    with torch.no_grad():
        expected = model.logits(tokens)
        torch.testing.assert_close(again.logits(tokens), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.05


def test_only_weights_that_need_it_are_changed(tmp_path: Path) -> None:
    name, arguments = CASES["mup"]
    model = made(name, arguments)
    source = InMemory(dict(model.state_dict()))
    export = plan_export(source, model, where="the model")
    tensors = dict(export.plan.tensors())
    state = model.state_dict()
    assert export.config["tie_word_embeddings"] is False
    assert torch.equal(
        tensors["model.layers.0.self_attn.k_proj.weight"], state["layers.0.attention.k_proj.weight"]
    )
    torch.testing.assert_close(
        tensors["model.embed_tokens.weight"], state["token_embeddings.weight"] * 3.3
    )
    assert export.factors.keys() == {
        *("token_embeddings", "position_embeddings", "lm_head"),
        *("layers.0.attention.q_proj", "layers.1.attention.q_proj"),
    }


def test_a_family_with_such_a_factor_keeps_it() -> None:
    gemma2 = GEMMA2 | {"attention_logits_alpha": 0.5}
    family, config, _, factors = family_fitting(made("gemma2", gemma2), name="gemma2")
    assert (family.name, config["query_pre_attn_scalar"], factors) == ("gemma2", 16, {})


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = CASES["mup"]
    write_weights(made(name, arguments).state_dict(), tmp_path / "weights.safetensors")
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"model": {"name": name, **arguments}}))
    words = [str(tmp_path / "weights.safetensors"), str(tmp_path / "hf"), "--to", "hf"]
    assert main(["checkpoint", "convert", *words, "--params", str(params)]) == 0
    assert "scales multiplied into its weights" in capsys.readouterr().out


def test_the_setting_without_counterpart_is_named_not_the_factors() -> None:
    model = made("llama", MODEL | MUP | {"use_ffn_bias_in_attention": True})
    with pytest.raises(ConfigError, match=r"^use_ffn_bias_in_attention: true"):
        family_fitting(model, family="llama")
    with pytest.raises(ConfigError, match=r"^embeddings_scale: 3"):
        family_fitting(made("gemma2", GEMMA2 | {"embeddings_scale": 3.0}), family="gemma2")
