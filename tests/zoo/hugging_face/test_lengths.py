"""The length of rows that is left out: that of a model of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.models import model_class
from tests.zoo.hugging_face.hf_cases import config_of
from tests.zoo.rows.toys import byte_tokenizer

pytest.importorskip("datasets", reason="needs datasets")

ROBERTA: dict[str, Any] = {
    "model_type": "roberta",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
}
MAMBA = {"model_type": "mamba", "vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1}
CAUSAL: dict[str, Any] = {"name": "hf_causal_lm", "config": config_of("llama")}
CLASSIFIER: dict[str, Any] = {
    "name": "hf_model",
    "auto_class": "AutoModelForSequenceClassification",
    "config": ROBERTA,
}
LLAMA_LENGTH = config_of("llama")["max_position_embeddings"]


def data_of(folder: Path, **given: Any) -> dict[str, Any]:
    texts = [{"text": "a b c d e f g h " * 9, "label": 0}] * 8
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    byte_tokenizer(folder / "bytes")
    return {
        "path": str(folder / "data.jsonl"),
        "tokenizer": str(folder / "bytes"),
        "cache_dir": str(folder / "cache"),
        "batch_size": 2,
        **given,
    }


def plan(folder: Path, model: dict[str, Any], **given: Any) -> Any:
    data = {"data_processor": "HuggingFaceDataProcessor", **data_of(folder, **given)}
    init = {"model": model, "optimizer": {"SGD": {"lr": 0.1}}}
    root = json.dumps({"trainer": {"init": init, "fit": {"train_dataloader": data}}})
    (found,) = check_config(read_text(root, "f.yaml"), shipped_names())
    return found


@pytest.mark.parametrize(
    ("model", "task", "length"),
    [
        (CAUSAL, "text", LLAMA_LENGTH),
        (CAUSAL | {"config_overrides": {"max_position_embeddings": 9}}, "text", 9),
        ({"name": "dpo", "policy_model": CAUSAL}, "text", LLAMA_LENGTH),
        (CLASSIFIER, "classification", 18),  # positions begin after the padding token
    ],
)
def test_rows_are_as_long_as_the_model_s_sequences(
    tmp_path: Path, model: Any, task: str, length: int
) -> None:
    found = plan(tmp_path, model, task=task)
    given = found.call["train_dataloader"].arguments
    assert given["max_sequence_length"] == length
    assert f"not set: {length}, max_position_embeddings" in str(found.notes[-1])
    arguments = {key: one for key, one in model.items() if key != "name"}
    made = model_class(model["name"])(**arguments)
    assert made.max_position_embeddings == length
    with lengths_of(made):
        rows = processor_class("HuggingFaceDataProcessor")(**data_of(tmp_path, task=task))
    batch = next(iter(rows.create_dataloader()))
    assert batch["input_ids"].shape == (2, length)
    if task == "classification":
        assert torch.isfinite(made(batch)["loss"])


@pytest.mark.parametrize("name", ["hf_causal_lm", "dpo"])
def test_a_model_of_the_hub_says_it_when_it_is_built(tmp_path: Path, name: str) -> None:
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "owner/name"}
    model = model if name == "hf_causal_lm" else {"name": name, "policy_model": model}
    found = plan(tmp_path, model)
    assert "max_sequence_length" not in found.call["train_dataloader"].arguments
    assert "known when the model is built" in str(found.notes[-1])
    with pytest.raises(ConfigError, match=r"tokenizer: 'nowhere\.json' does not exist"):
        plan(tmp_path, model, tokenizer="nowhere.json")


def test_a_model_without_a_length_leaves_the_argument_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_sequence_length: missing; HuggingFaceDataProcessor"):
        plan(tmp_path, {"name": "hf_causal_lm", "config": MAMBA})
    with pytest.raises(ConfigError, match=r"max_sequence_length is missing.*fit\(lambda"):
        processor_class("HuggingFaceDataProcessor")(**data_of(tmp_path))


def test_features_have_no_length_of_the_model(tmp_path: Path) -> None:
    given = {"task": "features", "tokenizer": None, "feature_columns": {"labels": "label"}}
    found = plan(tmp_path, CAUSAL, **given)
    assert "max_sequence_length" not in found.call["train_dataloader"].arguments
