"""The family mixtral against transformers."""

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
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_experts_per_tok": 1, "tie_word_embeddings": True, "output_router_logits": True},
        {"sliding_window": 5, "num_experts_per_tok": 4},
        {"head_dim": 16, "rope_parameters": {**ROPE, "rope_theta": 1e6}},
    ],
    ids=["plain", "top_1_tied", "window", "wide_heads_yarn"],
)
def test_mixtral_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**(SIZES | options)))
    check_family("mixtral", model, tmp_path, length=40)


def read(**options: Any) -> dict[str, Any]:
    return family_named("mixtral", where="config.json").read_config(SIZES | options, "config.json")


def test_the_load_balancing_loss_is_that_of_their_loss() -> None:
    assert "load_balancing_loss_coef" not in read(router_aux_loss_coef=0.02)["moe"]
    found = read(router_aux_loss_coef=0.02, output_router_logits=True)
    assert found["moe"]["load_balancing_loss_coef"] == 0.02
    assert found["moe"]["load_balancing_loss_over"] == "batch"
    config = family_for(Gpt2.settings_of(**found), "mixtral")[1]
    assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (True, 0.02)


@pytest.mark.parametrize("options", [{"router_jitter_noise": 0.1}, {"hidden_act": "mish"}])
def test_an_option_without_counterpart_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts: 1"),
        ({"router_use_bias": True}, "router_use_bias: True"),
        ({"expert_weighting_normalization": False}, "expert_weighting_normalization: False"),
        ({"router_selection_nonlinearity": "sigmoid"}, "router_selection_nonlinearity: sigmoid"),
    ],
)
def test_another_router_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    arguments = read()
    arguments["moe"] |= options
    with pytest.raises(ConfigError, match=named):
        family_for(Gpt2.settings_of(**arguments), "mixtral")
