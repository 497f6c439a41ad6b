"""The families gptj, gpt_neox and falcon against transformers: decoders of the GPT-J class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.family import family_for, family_named, family_of
from modelzoo_trainer.zoo.models.gptj import GptJ
from tests.zoo.hugging_face.conversions import check_family

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
GPTJ: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "rotary_dim": 4,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
NEOX = SIZES | {"intermediate_size": 48}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary_dim": 8, "n_inner": 48, "activation_function": "gelu"},
        {"tie_word_embeddings": True, "activation_function": "leaky_relu"},
    ],
    ids=["plain", "whole_heads", "tied"],
)
def test_gptj_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**(GPTJ | options)))
    check_family("gptj", model, tmp_path, length=20)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}, "hidden_act": "gelu_fast"},
        {"attention_bias": False, "tie_word_embeddings": True, "num_attention_heads": 2},
        {"use_parallel_residual": False},
    ],
    ids=["plain", "linear", "no_biases_tied", "sequential"],
)
def test_gpt_neox_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    name = "gpt_neox_sequential" if "use_parallel_residual" in options else "gpt_neox"
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**(NEOX | options)))
    check_family(name, model, tmp_path, length=20)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_query": False, "bias": True, "tie_word_embeddings": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
        {"new_decoder_architecture": True, "num_kv_heads": 4, "rope_parameters": LINEAR},
        {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"parallel_attn": False},
        {"parallel_attn": False, "multi_query": False, "bias": True},
    ],
    ids=[
        *("7B", "7B_all_heads", "40B", "40B_all_heads", "one_norm_one_group", "11B"),
        *("sequential", "sequential_all_heads"),
    ],
)
def test_falcon_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    name = "falcon_sequential" if "parallel_attn" in options else "falcon"
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**(SIZES | options)))
    check_family(name, model, tmp_path, length=20)


def read(name: str, **options: Any) -> dict[str, Any]:
    config = {"gptj": GPTJ, "gpt_neox": NEOX}.get(name, SIZES) | options
    return family_named(name, where="config.json").read_config(config, "config.json")


def test_the_family_follows_from_the_block_of_a_file() -> None:
    for name, key in (("gpt_neox", "use_parallel_residual"), ("falcon", "parallel_attn")):
        for value in (True, False):
            found = family_of({"model_type": name, key: value}, where="config.json").name
            assert found == (name if value else f"{name}_sequential")
        assert family_of({"model_type": name}, where="config.json").name == name


def test_older_files_are_read() -> None:
    pythia = read("gpt_neox", rotary_pct=0.5, rotary_emb_base=5000, use_parallel_residual=True)
    assert (pythia["rotary_dim"], pythia["rope_theta"]) == (4, 5000.0)
    gptj = read("gptj", rotary=True, scale_attn_weights=True, summary_type="cls_index", n_ctx=64)
    assert gptj["rotary_dim"] == 4


def test_the_first_release_of_falcon_is_read() -> None:
    first = {
        "model_type": "RefinedWeb",
        "auto_map": {"AutoConfig": "configuration_RW.RWConfig"},
        "apply_residual_connection_post_layernorm": False,
        "vocab_size": 99,
        "hidden_size": 32,
        "n_head": 4,
        "n_head_kv": 2,
        "n_layer": 2,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }
    found = family_of(first, where="config.json").read_config(first, "config.json")
    assert (found["use_untied_layer_norm"], found["extra_attention_params"]) == (
        True,
        {"num_kv_groups": 2},
    )
    seven = {key: one for key, one in first.items() if key != "n_head_kv"}
    seven |= {"model_type": "RefinedWebModel", "multi_query": True}
    found = family_of(seven, where="config.json").read_config(seven, "config.json")
    assert (found["use_untied_layer_norm"], found["extra_attention_params"]) == (
        False,
        {"num_kv_groups": 1},
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gptj", {"rotary": False}),
        ("gptj", {"rotary_dim": None}),
        ("gptj", {"scale_attn_weights": False}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gpt_neox", {"hidden_act": "gelu_10"}),
        ("falcon", {"alibi": True}),
        ("falcon", {"num_kv_heads": 2, "multi_query": False}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("falcon", {"parallel_attn": False}),
        ("falcon_sequential", {"new_decoder_architecture": True, "parallel_attn": False}),
    ],
)
def test_an_option_without_counterpart_is_refused_by_name(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gptj", {"rope_theta": 5000.0}),
        ("gptj", {"use_bias_in_output": False}),
        ("gptj", {"attention_sliding_window_length": 8}),
        ("gpt_neox", {"use_ffn_bias": False}),
        ("gpt_neox", {"norm_type": "rmsnorm"}),
        ("falcon", {"rotary_dim": 4}),
        ("falcon", {"use_ffn_bias": True}),
    ],
)
def test_a_setting_without_counterpart_is_refused_by_name(
    name: str, options: dict[str, Any]
) -> None:
    settings = GptJ.settings_of(**(read(name) | options))
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*family {name} "):
        family_for(settings, family_named(name, where="the test").model_name)
