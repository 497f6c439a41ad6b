"""The families llama and mistral against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.zoo.hugging_face.conversions import check_family

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5],
    "original_max_position_embeddings": 64,
}
LONG = LONGROPE | {"long_factor": [1.0, 1.5, 2.0, 2.5], "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10000.0, "attention_factor": 1.3}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"head_dim": 16},
        {"rope_parameters": {**LONGROPE, "rope_theta": 10000.0}},
        {"rope_parameters": {**LONG, "rope_theta": 500.0}},
        {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    ],
    ids=[
        "plain",
        "tied",
        "biases",
        "llama3",
        "yarn",
        "yarn_factor",
        "linear",
        "head_dim",
        "longrope",
        "longrope_long",
        "one_group",
    ],
)
def test_llama_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | options)))
    check_family("llama", model, tmp_path, length=40)


@pytest.mark.parametrize("window", [None, 5])
def test_mistral_is_converted_both_ways(window: int | None, tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=window)
    model = transformers.MistralForCausalLM(config)
    check_family("mistral", model, tmp_path, length=20)
