"""The family gemma2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.family import family_for, family_named
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.zoo.hugging_face.conversions import check_family

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        {"layer_types": [FULL, SLIDING, FULL], "head_dim": 8, "attention_bias": True},
        {"layer_types": [SLIDING] * 3, "hidden_activation": "gelu", "tie_word_embeddings": False},
        {"layer_types": [FULL] * 3, "attn_logit_softcapping": None, "query_pre_attn_scalar": 16},
        {"final_logit_softcapping": None, "num_key_value_heads": 4},
    ],
    ids=["plain", "scalar", "full_first", "all_sliding", "all_full", "unbounded"],
)
def test_gemma2_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**(SIZES | options)))
    check_family("gemma2", model, tmp_path, length=20)


def read(**options: Any) -> dict[str, Any]:
    config = {key: one for key, one in SIZES.items() if key != "attn_implementation"} | options
    return family_named("gemma2", where="config.json").read_config(config, "config.json")


def test_keys_that_older_files_lack_have_their_defaults() -> None:
    found = read(hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid")
    assert found["nonlinearity"] == "geglu_new"
    assert found["sliding_window_every_other_decoder_layer_pattern"] == "sliding_window_first"
    assert (found["attention_logit_softcapping"], found["final_logit_softcapping"]) == (50, 30)
    assert found["share_embedding_weights"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_bidirectional_attention": True},
        {"hidden_activation": "relu6"},
        {"layer_types": [FULL, FULL, SLIDING]},
        {"layer_types": ["chunked_attention"] * 3},
    ],
)
def test_an_option_without_counterpart_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read(**options)


@pytest.mark.parametrize(
    "options", [{"embeddings_scale": 2.0}, {"norm_first_sandwich": False}, {"use_ffn_bias": True}]
)
def test_a_setting_without_counterpart_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        family_for(Gpt2.settings_of(**(read() | options)), "gemma2")


def test_bounds_are_written_as_transformers_requires_them() -> None:
    settings = Gpt2.settings_of(**(read() | {"final_logit_softcapping": 3}))
    bound = family_for(settings, "gemma2")[1]["final_logit_softcapping"]
    assert (bound, type(bound)) == (3.0, float)


def test_a_factor_that_is_no_root_of_an_integer_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_logits_alpha"):
        family_for(Gpt2.settings_of(**(read() | {"attention_logits_alpha": 1.234})), "gemma2")
