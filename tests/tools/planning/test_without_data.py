"""A plan knows the shapes of a batch from the settings of the data processor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.registry import processor_class
from modelzoo_trainer.zoo.data.sample_features import Feature

FILE = """
trainer:
  init:
    device: cpu
    model: {name: gpt2, vocab_size: 320, hidden_size: 16, num_hidden_layers: 2, num_heads: 2,
            filter_size: 32, max_position_embeddings: 24, dropout_rate: 0.0}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 3}
  fit:
    train_dataloader: {data_processor: GptHDF5MapDataProcessor, data_dir: nowhere, batch_size: 4}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE)
    return lambda *words: main(["plan", "params.yaml", *words])


def test_a_file_is_planned_whose_data_are_not_here(plan: Any, capfd: Any) -> None:
    assert plan("--world-size", "2") == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["samples", "per", "step", "4", "2"] in rows
    assert os.listdir() == ["params.yaml"]


def test_data_that_are_asked_for_must_be_there(plan: Any, capfd: Any) -> None:
    assert plan("--data") == 2
    assert "nowhere" in capfd.readouterr().err


def test_a_processor_that_cannot_do_without_data_says_so(plan: Any, capfd: Any) -> None:
    loader = "{data_processor: DPRHDF5DataProcessor, data_dir: nowhere, batch_size: 4}"
    assert plan(f"--set=fit.train_dataloader={loader}") == 2
    text = capfd.readouterr().err
    assert "plan cannot know the samples of DPRHDF5DataProcessor without its data" in text
    assert "nowhere" in text


class Sized(nn.Module):
    """A model with the attributes that data follow."""

    max_position_embeddings = 24
    disable_nsp = False
    num_features_of_image = 9
    src_max_position_embeddings = 12
    tgt_max_position_embeddings = 6


def features(name: str, model: Any = None, **arguments: Any) -> Any:
    processor = processor_class(name).unopened(**arguments)
    return processor.sample_features(Sized() if model is None else model)


def shapes(name: str, **arguments: Any) -> dict[str, tuple[int, ...]]:
    return {key: one.shape for key, one in features(name, **arguments).items()}


def test_tokens_have_the_length_that_is_set_or_the_model_has() -> None:
    name = "GptHDF5MapDataProcessor"
    assert set(shapes(name, data_dir="a", max_sequence_length=8).values()) == {(8,)}
    assert set(shapes(name, data_dir="a").values()) == {(24,)}
    assert "attention_span" in shapes(name, data_dir="a", use_vsl=True)
    with pytest.raises(ConfigError, match="max_position_embeddings of the model, or plan with"):
        features(name, nn.Identity(), data_dir="a")


def test_sink_tokens_are_part_of_the_length_of_the_model() -> None:
    sinks = [{"name": "add_sink_tokens", "num_sink_tokens": 4}]
    name = "GptHDF5MapDataProcessor"
    assert set(shapes(name, data_dir="a", data_transforms=sinks).values()) == {(24,)}
    given = {"data_transforms": sinks, "max_sequence_length": 10}
    assert set(shapes(name, data_dir="a", **given).values()) == {(14,)}


def test_processors_describe_what_models_get() -> None:
    found = shapes(
        "BertCSVDynamicMaskDataProcessor", data_dir="a", vocab_file="v", max_predictions_per_seq=5
    )
    assert found["labels"] == found["masked_lm_positions"] == (5,)
    assert found["token_type_ids"] == (24,)
    assert shapes("T5DynamicDataProcessor", src_data_dir="a")["decoder_input_ids"] == (6,)
    assert len(shapes("DpoHDF5DataProcessor", data_dir="a")) == 6
    tasks = {"path": "a", "tokenizer": "t"}
    assert features("HuggingFaceDataProcessor", task="features", path="a") is None
    assert features("HuggingFaceDataProcessor", task="classification", **tasks)["labels"] == (
        Feature((), torch.int64)
    )


@pytest.mark.parametrize("kind", ["tokens", "classification"])
def test_what_is_described_is_what_a_loader_yields(kind: str) -> None:
    given = {"kind": kind, "batch_size": 3, "num_samples": 6}
    cls = processor_class("SyntheticProcessor")
    batch = next(iter(cls(**given).create_dataloader()))
    found = cls.unopened(**given).sample_features(None)
    assert described(batch) == found


def described(batch: Any) -> Any:
    """Return the features of a batch's samples."""

    def feature(tensor: Tensor) -> Feature:
        return Feature(tuple(tensor.shape[1:]), tensor.dtype)

    found = tree_map(feature, batch)
    return tuple(found) if isinstance(batch, list | tuple) else found
