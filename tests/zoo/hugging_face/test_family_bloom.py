"""The families bloom and gpt_bigcode (StarCoder) against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import CheckpointError, ConfigError
from modelzoo_trainer.zoo.conversion.engine import plan_ours, shapes_of
from modelzoo_trainer.zoo.conversion.family import family_for, family_named
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.zoo.hugging_face.conversions import InMemory, check_family, theirs_from

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

BLOOM: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "n_head": 4, "n_layer": 2}
STARCODER: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"hidden_size": 48, "n_head": 6}, {"tie_word_embeddings": False, "n_head": 16}],
    ids=["plain", "six_heads", "untied"],
)
def test_bloom_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**(BLOOM | options)))
    check_family("bloom", model, tmp_path, length=40)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_query": False, "activation_function": "gelu", "n_inner": 48},
        {"tie_word_embeddings": False, "scale_attn_weights": False},
    ],
    ids=["multi_query", "all_heads", "untied_unscaled"],
)
def test_starcoder_is_converted_both_ways(options: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.GPTBigCodeConfig(**(STARCODER | options))
    check_family("gpt_bigcode", transformers.GPTBigCodeForCausalLM(config), tmp_path, length=20)


def read(name: str, **options: Any) -> dict[str, Any]:
    config = {"bloom": BLOOM, "gpt_bigcode": STARCODER}[name] | options
    return family_named(name, where="config.json").read_config(config, "config.json")


def test_a_published_file_of_bloom_is_read_with_its_length() -> None:
    found = read("bloom", seq_length=512, offset_alibi=100, skip_bias_add=True, pretraining_tp=2)
    assert found["max_position_embeddings"] == 512
    config = family_for(Gpt2.settings_of(**found), "bloom")[1]
    assert config["seq_length"] == 512


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("gpt_bigcode", {"add_cross_attention": True}),
        ("gpt_bigcode", {"activation_function": "laplace"}),
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
        ("bloom", {"filter_size": 48}),
        ("bloom", {"nonlinearity": "gelu"}),
        ("bloom", {"pos_scaling_factor": 2.0}),
        ("bloom", {"alibi_trainable_slopes": True}),
        ("gpt_bigcode", {"extra_attention_params": {"num_kv_groups": 2}}),
        ("gpt_bigcode", {"position_embedding_offset": 2}),
    ],
)
def test_a_setting_without_counterpart_is_refused_by_name(
    name: str, options: dict[str, Any]
) -> None:
    settings = Gpt2.settings_of(**(read(name) | options))
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}.*family {name} "):
        family_for(settings, family_named(name, where="the test").model_name)


def test_other_slopes_than_those_of_the_family_are_refused() -> None:
    family = family_named("bloom", where="the test")
    model = Gpt2(**read("bloom"))
    with torch.no_grad():
        model.get_parameter("position_bias.slopes.weight")[1] += 0.1
    with pytest.raises(CheckpointError, match=r"slopes.weight differs.*4 heads"):
        theirs_from(family, model)


def test_files_without_the_prefix_of_the_model_are_read() -> None:
    family, arguments = family_named("bloom", where="the test"), read("bloom")
    model = Gpt2(**arguments)
    _, tensors = theirs_from(family, model)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plan = plan_ours(
        family.rules(model), InMemory(bare), shapes_of(Gpt2, arguments), family, where="the files"
    )
    state = model.state_dict()
    for name, tensor in plan.tensors():
        assert torch.equal(tensor, state[name])
