"""Changed settings of an architecture give the model that these settings make from scratch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from tests.zoo.hugging_face.hf_cases import config_of, language_batch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

LINEAR: dict[str, Any] = {"factor": 4.0}


def folder_of(config: dict[str, Any], path: Path) -> Path:
    torch.manual_seed(0)
    HfCausalLm(config=config).save_pretrained(path)
    return path


def logits_of(model: HfCausalLm) -> torch.Tensor:
    return model.eval().logits(language_batch()["input_ids"])


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"rope_theta": 20.0}),
        ("llama", {"rope_scaling": {"type": "linear", **LINEAR}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", **LINEAR}, "rope_theta": 20.0}),
        ("llama", {"rope_parameters": {"rope_theta": 20.0}}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen2", {"max_window_layers": 0}),
        ("qwen2", {"rms_norm_eps": 0.1}),
        ("phi", {"rope_theta": 20.0}),
    ],
)
def test_changes_have_their_effect(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(model_type)
    folder = folder_of(config, tmp_path / "plain")
    changed = HfCausalLm(config=config | changes)
    changed.load_state_dict(HfCausalLm(pretrained_model_name_or_path=str(folder)).state_dict())
    of_config = HfCausalLm(config=config, config_overrides=changes)
    of_config.load_state_dict(changed.state_dict())
    of_folder = HfCausalLm(pretrained_model_name_or_path=str(folder), config_overrides=changes)
    expected = logits_of(changed)
    assert not torch.equal(
        expected, logits_of(HfCausalLm(pretrained_model_name_or_path=str(folder)))
    )
    assert torch.equal(logits_of(of_config), expected)
    assert torch.equal(logits_of(of_folder), expected)


def test_fewer_layers_of_several_types(tmp_path: Path) -> None:
    folder = folder_of(config_of("qwen2"), tmp_path)
    model = HfCausalLm(
        pretrained_model_name_or_path=str(folder),
        pretrained=False,
        config_overrides={"num_hidden_layers": 1},
    )
    assert model.config.layer_types == ["full_attention"]


def test_scaling_of_positions_is_removed(tmp_path: Path) -> None:
    scaled = config_of("llama") | {"rope_theta": 20.0}
    scaled["rope_scaling"] = {"rope_type": "linear", **LINEAR}
    folder = folder_of(scaled, tmp_path)
    model = HfCausalLm(
        pretrained_model_name_or_path=str(folder), config_overrides={"rope_scaling": None}
    )
    assert model.config.rope_parameters == {"rope_theta": 20.0, "rope_type": "default"}


def test_positions_by_type_of_layer() -> None:
    config = config_of("gemma3_text")
    with pytest.raises(ConfigError, match=r"rope_theta: .*rope_parameters: \{full_attention: "):
        HfCausalLm(config=config, config_overrides={"rope_theta": 20.0})
    changes = {"rope_parameters": {"full_attention": {"rope_theta": 20.0}}}
    found = HfCausalLm(config=config, config_overrides=changes).config.rope_parameters
    assert found["full_attention"] == {"rope_theta": 20.0, "rope_type": "default"}
    assert found["sliding_attention"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_number_of_classes_of_a_folder_with_others(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100}
    bert |= {"num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    task = "AutoModelForSequenceClassification"
    HfModel(auto_class=task, config=bert).save_pretrained(tmp_path)
    model = HfModel(
        auto_class=task,
        pretrained_model_name_or_path=str(tmp_path),
        pretrained=False,
        config_overrides={"num_labels": 5},
    )
    assert model.model.classifier.out_features == 5
    assert model.config.num_labels == 5
