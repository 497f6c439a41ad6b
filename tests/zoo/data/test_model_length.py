"""Lengths of samples that are left out: those of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from modelzoo_trainer import Trainer
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.core import TrainingLoop
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.models import model_class

LENGTH = 12
DECODER: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "filter_size": 8,
    "max_position_embeddings": LENGTH,
}
T5: dict[str, Any] = {
    "src_vocab_size": 64,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_heads": 2,
    "encoder_num_hidden_layers": 1,
    "src_max_position_embeddings": 30,
    "tgt_max_position_embeddings": 29,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": DECODER,
    "gptj": {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1},
    "t5": T5,
    "fc_mnist": {"hidden_sizes": [4]},
    "dpo": {"policy_model": {"name": "gpt2", **DECODER}},
}
OWN = "tests.zoo.data.test_model_length"


@pytest.fixture(scope="module")
def names() -> Any:
    return shipped_names()


def made_of(name: str) -> Any:
    return model_class(name)(**MODELS[name])


def data_in(folder: Path) -> dict[str, str]:
    for number in range(20):
        (folder / f"{number}.txt").write_text("to be or not to be " * 9)
    return {"data_dir": str(folder), "cache_dir": str(folder / "cache")}


def plan(names: Any, folder: Path, model: dict[str, Any], **data: Any) -> Any:
    section = {"data_processor": "TextFileProcessor", "batch_size": 2} | data_in(folder)
    init = {
        "device": "cpu",
        "model_dir": str(folder / "run"),
        "model": model,
        "optimizer": {"SGD": {"learning_rate": 0.1}},
        "loop": {"max_steps": 1},
    }
    fit = {"train_dataloader": section | data}
    (found,) = check_config(
        read_text(str({"trainer": {"init": init, "fit": fit}}).replace("None", "null"), "f.yaml"),
        names,
    )
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_check_knows_the_lengths_of_a_model_without_building_it(names: Any, name: str) -> None:
    component = type("Named", (), {"target": model_class(name), "arguments": MODELS[name]})
    model = made_of(name)
    for key in ("max", "src_max", "tgt_max"):
        attribute = f"{key}_position_embeddings"
        found = getattr(model, attribute, None)
        assert names.model_limit(component, attribute) == found, attribute


class Own(torch.nn.Module):
    shapes: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.max_position_embeddings = LENGTH

    def forward(self, batch: Any) -> Any:
        self.shapes.append(tuple(batch["input_ids"].shape))
        return self.weight * batch["input_ids"].float().mean()


def text(folder: Path, **changes: Any) -> Any:
    options = data_in(folder) | {"batch_size": 2}
    return processor_class("TextFileProcessor")(**options | changes).create_dataloader()


@pytest.mark.parametrize("given", [{}, {"max_sequence_length": None}])
def test_a_file_that_leaves_it_out_trains_with_what_its_check_says(
    names: Any, tmp_path: Path, given: Any
) -> None:
    found = plan(names, tmp_path, {"name": "gpt2", **DECODER}, **given)
    [note] = map(str, found.notes)
    assert note.endswith("max_sequence_length: not set: 12, max_position_embeddings of the model.")
    loader = found.call["train_dataloader"]
    assert loader.arguments["max_sequence_length"] == LENGTH
    batch = next(iter(loader.build().create_dataloader()))
    assert batch["input_ids"].shape == (2, LENGTH)


def test_a_length_that_is_given_is_kept(names: Any, tmp_path: Path) -> None:
    found = plan(names, tmp_path, {"name": "gpt2", **DECODER}, max_sequence_length=5)
    assert found.call["train_dataloader"].arguments["max_sequence_length"] == 5
    assert not found.notes


@pytest.mark.parametrize(
    "model",
    [
        {"name": "dpo"},
        {"name": "hf_causal_lm", "config": {"model_type": "gpt2"}, "revision": "main"},
    ],
)
def test_a_model_with_problems_is_not_asked(
    names: Any, tmp_path: Path, model: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(names, tmp_path, model)
    assert all(line.startswith("f.yaml:1:") for line in str(caught.value).splitlines())
    assert "trainer.init.model" in str(caught.value)


def test_both_lengths_of_pairs_are_those_of_the_model(names: Any, tmp_path: Path) -> None:
    (tmp_path / "vocab").write_text("a\n")
    (tmp_path / "meta.dat").write_text("")
    data = {"src_vocab_file": str(tmp_path / "vocab"), "src_data_dir": str(tmp_path)}
    root = str(
        {
            "trainer": {
                "init": {"model": {"name": "t5", **T5}, "optimizer": {"SGD": {"lr": 0.1}}},
                "fit": {
                    "train_dataloader": {
                        "data_processor": "T5DynamicDataProcessor",
                        "batch_size": 2,
                        "extra_ids": 9,
                        **data,
                    }
                },
            }
        }
    )
    [found] = check_config(read_text(root, "f.yaml"), names)
    given = found.call["train_dataloader"].arguments
    assert (given["src_max_sequence_length"], given["tgt_max_sequence_length"]) == (30, 29)


@pytest.mark.parametrize("model", [{"name": "fc_mnist", "hidden_sizes": [4]}, {"name": "t5", **T5}])
def test_a_model_without_a_length_leaves_the_argument_missing(
    names: Any, tmp_path: Path, model: Any
) -> None:
    said = r"max_sequence_length: missing; TextFileProcessor requires it .*no max_position_embed"
    with pytest.raises(ConfigError, match=said):
        plan(names, tmp_path, model)


def test_a_model_of_the_user_says_it_when_it_is_built(
    names: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = plan(names, tmp_path, {f"{OWN}.Own": {}})
    assert "known when the model is built" in str(found.notes[0])
    shapes = found.init["model"].target.shapes
    shapes.clear()
    with found.build() as trainer, caplog.at_level(logging.INFO, "modelzoo_trainer.data"):
        found.run(trainer)
    assert shapes == [(2, LENGTH)]
    assert "TextFileProcessor: max_sequence_length is 12, max_position_embeddings" in caplog.text


def test_a_function_that_the_trainer_calls_creates_data_of_the_model_s_length(
    tmp_path: Path,
) -> None:
    def make(**options: Any) -> Any:
        return lambda: text(tmp_path, **options)

    Own.shapes.clear()
    with Trainer(
        device="cpu",
        model_dir=tmp_path / "run",
        model=Own(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=1, eval_steps=1),
        progress="none",
    ) as trainer:
        trainer.fit(make(), make(split="val"))
        trainer.validate(make())
        trainer.test(make(), eval_steps=1)
        trainer.fit(make(max_sequence_length=3))
    assert set(Own.shapes) == {(2, LENGTH)}
    with pytest.raises(ConfigError, match=r"TextFileProcessor\.max_sequence_length is missing"):
        text(tmp_path)


@pytest.mark.parametrize("model", [object(), None])
def test_without_a_length_the_argument_is_missing(tmp_path: Path, model: Any) -> None:
    with lengths_of(model), pytest.raises(ConfigError, match=r"is missing\. Set it; or"):
        text(tmp_path)
