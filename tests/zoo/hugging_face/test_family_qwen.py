"""The families qwen2 and qwen3 against transformers."""

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
    "max_position_embeddings": 64,
}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, **WINDOW, "max_window_layers": 0},
        {"layer_types": [SLIDING, FULL, SLIDING], **WINDOW},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}, "head_dim": 16},
    ],
    ids=["plain", "tied_window", "alternating", "yarn"],
)
def test_qwen2_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SIZES | options)))
    check_family("qwen2", model, tmp_path, length=20)


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 16},
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
        {"head_dim": 8, **WINDOW, "max_window_layers": 3},
    ],
    ids=["wide_heads", "biases_tied", "no_layer_with_window"],
)
def test_qwen3_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | options)))
    check_family("qwen3", model, tmp_path, length=20)


def read(name: str, **options: Any) -> dict[str, Any]:
    return family_named(name, where="config.json").read_config(SIZES | options, "config.json")


def test_the_window_is_off_unless_asked_for() -> None:
    found = read("qwen2", sliding_window=8, max_window_layers=0)
    assert "attention_sliding_window_length" not in found


def test_a_llama_with_biases_of_queries_keys_and_values_is_a_qwen2() -> None:
    settings = Gpt2.settings_of(**read("qwen2"))
    assert family_for(settings, "llama")[0].name == "qwen2"
    assert family_for(Gpt2.settings_of(**read("qwen3", head_dim=8)), "llama")[0].name == "qwen3"


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("layer_types", {**WINDOW, "max_window_layers": 1}),
        ("layer_types", {"layer_types": [SLIDING] * 3}),
        ("hidden_act", {"hidden_act": "mish"}),
    ],
)
def test_an_option_without_counterpart_is_refused_by_name(
    key: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=key):
        read("qwen2", **options)
