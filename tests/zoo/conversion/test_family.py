"""Families refuse what has no counterpart, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.family import families, family_for, family_named, family_of
from modelzoo_trainer.zoo.conversion.readers import SettingsReader
from modelzoo_trainer.zoo.models.gpt2 import Gpt2, Gpt2Settings
from modelzoo_trainer.zoo.models.registry import MODELS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def read(**options: Any) -> dict[str, Any]:
    family = family_named("llama", where="config.json")
    return family.read_config(LLAMA | options, "config.json")


def test_families_are_decoders_of_ours() -> None:
    assert all(family.model_name in MODELS for family in families().values())


def test_keys_that_change_nothing_are_accepted() -> None:
    assert read(torch_dtype="bfloat16", bos_token_id=1, pretraining_tp=2)["rotary_dim"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_act": "mish"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"quantization_config": {"bits": 4}},
        {"new_kind_of_attention": 3},
        {"is_encoder_decoder": True},
    ],
)
def test_an_option_without_counterpart_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read(**options)


@pytest.mark.parametrize("named", [5, None, "BertForMaskedLM", []])
def test_architectures_of_another_kind_name_none(named: Any) -> None:
    family = family_of({"model_type": "bert", "architectures": named}, where="config.json")
    assert family is family_of({"model_type": "bert"}, where="config.json")


def test_a_missing_and_an_invalid_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden_size"):
        read(hidden_size=None)
    with pytest.raises(ConfigError, match="hidden_size is '8'; expected an integer"):
        read(hidden_size="8")


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0; expected an integer >= 1"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan; expected a finite number"),
        ("llama", {"attention_dropout": 2.5}, "attention_dropout_rate"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_groups"),
        (
            "llama",
            {"rope_parameters": {"rope_type": ["x"]}},
            r"rope_parameters.rope_type is \['x'\]",
        ),
        ("llama", {"rope_scaling": {"rope_theta": "x"}}, "rope_scaling.rope_theta is 'x'"),
        ("llama", {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor is 0.5"),
        (
            "llama",
            {"rope_scaling": YARN | {"attention_factor": "x"}},
            "rope_scaling.attention_factor",
        ),
        ("gpt_neox", {"rotary_pct": math.inf}, "rotary_pct is inf"),
        (
            "gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 2}},
            "partial_rotary_factor is 2",
        ),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen2", {"layer_types": [["x"]]}, "layer_types"),
    ],
)
def test_an_invalid_value_is_refused_with_the_file(
    name: str, options: dict[str, Any], said: str
) -> None:
    family = family_named(name, where="the test")
    with pytest.raises(ConfigError, match=f"^config.json: .*{said}"):
        family.read_config(LLAMA | options, "config.json")


def test_a_null_among_the_rotary_positions_is_the_default() -> None:
    assert read(rope_parameters={"rope_type": None, "rope_theta": None}) == read()


def test_older_files_have_the_rotary_positions_in_two_keys() -> None:
    found = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})
    assert (found["rope_theta"], found["pos_scaling_factor"]) == (5e5, 4.0)


def test_an_unknown_family_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'lama'.*Did you mean 'llama'.*gpt2, .*llama, mistral"):
        family_named("lama", where="config.json")


def settings_of(**arguments: Any) -> Gpt2Settings:
    sizes = {"hidden_size": 8, "num_heads": 2, "filter_size": 12, "vocab_size": 10}
    settings = Gpt2.settings_of(**(sizes | arguments))
    assert isinstance(settings, Gpt2Settings)
    return settings


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"embeddings_scale": 2.0}, "embeddings_scale: 2.0"),
        ({"norm_type": "rmsnorm"}, "norm_type: rmsnorm"),
        ({"mup_base_hidden_size": 4, "mup_base_filter_size": 4}, "mup_base_hidden_size: 4"),
        ({"final_logit_softcapping": 3.0}, "final_logit_softcapping: 3.0"),
        ({"moe": {"num_experts": 2}}, "moe"),
        ({"attention_logits_alpha": 3.0}, "attention_logits_alpha: 3.0"),
        ({"norm_first_sandwich": True}, "norm_first_sandwich: true"),
    ],
)
def test_a_setting_without_counterpart_is_refused_by_name(
    arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.*no counterpart.*family gpt2"):
        family_for(settings_of(**arguments), "gpt2")


def test_the_family_of_settings_without_a_name_is_found() -> None:
    gpt2, config = family_for(settings_of(), None)
    assert (gpt2.name, config["vocab_size"], config["model_type"]) == ("gpt2", 10, "gpt2")
    llama = settings_of(**read())
    assert family_for(llama, None)[0].name == "llama"
    windowed = settings_of(**read(), attention_sliding_window_length=4)
    assert family_for(windowed, "llama")[0].name == "mistral"


def test_a_family_that_does_not_read_a_setting_is_found_out() -> None:
    with pytest.raises(RuntimeError, match="does not read"):
        SettingsReader(settings_of(), "new").finish()


ROPE = {"rope_type": "longrope", "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5]}


def test_a_file_without_a_window_of_mistral_has_theirs() -> None:
    mistral = family_named("mistral", where="config.json")
    found = mistral.read_config(LLAMA | {"num_key_value_heads": 2}, "config.json")
    assert found["attention_sliding_window_length"] == 4096
    given = LLAMA | {"num_key_value_heads": 2, "sliding_window": None}
    assert mistral.read_config(given, "config.json")["attention_sliding_window_length"] is None


def test_longrope_is_converted_where_its_factors_do_not_depend_on_the_batch() -> None:
    rope = ROPE | {"original_max_position_embeddings": 16}
    found = read(rope_scaling=rope)
    assert found["pos_scaling_extra_args"]["attention_factor"] == 1.0
    config = family_for(settings_of(**found), "llama")[1]
    assert config["rope_parameters"]["short_factor"] == [1.0, 1.5]
    with pytest.raises(ConfigError, match=r"rope_scaling.*length of a batch"):
        read(rope_scaling=rope | {"original_max_position_embeddings": 8})


def test_two_forms_of_rotary_positions_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_parameters=linear, rope_scaling=linear)["pos_scaling_factor"] == 2.0
    with pytest.raises(ConfigError, match=r"rope_scaling.*another factor"):
        read(rope_parameters=linear, rope_scaling=linear | {"factor": 4.0})


def test_the_magnitude_of_yarn_may_be_given_in_two_parts() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
    found = read(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 0.5})
    expected = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert found["pos_scaling_extra_args"]["mscale_b"] == pytest.approx(expected)
    assert read(rope_scaling=yarn | {"mscale": 1.0}) == read(rope_scaling=yarn)
    given = yarn | {"attention_factor": 1.3}  # then the parts do not count
    assert read(rope_scaling=given | {"mscale": 1.0, "mscale_all_dim": 0.5}) == read(
        rope_scaling=given
    )
