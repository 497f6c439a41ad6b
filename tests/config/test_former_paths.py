"""Dotted paths of classes that have moved, in files."""

from __future__ import annotations

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import apply_overrides, parse_override
from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.config.shipped import shipped_names

FILE = """\
trainer:
  init:
    device: cpu
    model: {modelzoo_trainer.models.fc_mnist.FcMnist: {hidden_sizes: [4], input_size: 64}}
    optimizer: {SGD: {lr: 0.1}}
    callbacks:
      - modelzoo_trainer.callbacks.flags.GlobalFlags: {}
    loop: {max_steps: 1}
    model_dir: %s
  fit:
    train_dataloader:
      data_processor: modelzoo_trainer.data.digits.DigitsProcessor
      batch_size: 2
"""
pytestmark = pytest.mark.filterwarnings("ignore:modelzoo_trainer.* is now ")


def notes_of(text: str, *changes: str) -> list[str]:
    root = apply_overrides(read_text(text, "p.yaml"), [parse_override(one) for one in changes])
    (plan,) = check_config(root, shipped_names())
    return [str(note) for note in plan.notes]


def test_former_paths_of_classes_are_noted_with_their_places_and_present_paths() -> None:
    model, callback, processor = notes_of(FILE % "run")
    assert model.startswith("p.yaml:4:13: trainer.init.model: modelzoo_trainer.models.")
    assert " is now modelzoo_trainer.zoo.models.fc_mnist.FcMnist; " in model
    assert callback.startswith("p.yaml:7:9: trainer.init.callbacks[0]: modelzoo_trainer.")
    assert " is now modelzoo_trainer.zoo.callbacks.flags.GlobalFlags; " in callback
    assert processor.startswith("p.yaml:12:23: trainer.fit.train_dataloader.data_processor: ")
    assert " is now modelzoo_trainer.zoo.data.digits.DigitsProcessor; " in processor


def test_a_former_path_in_an_option_is_noted() -> None:
    text = (FILE % "run").replace("modelzoo_trainer.data.digits.", "")
    path = "modelzoo_trainer.data.digits.DigitsProcessor"
    notes = notes_of(text, f"trainer.fit.train_dataloader.data_processor={path}")
    assert " is now modelzoo_trainer.zoo.data.digits.DigitsProcessor; " in notes[-1]


@pytest.mark.parametrize(
    "path",
    [
        "modelzoo_trainer.zoo.data.digits.DigitsProcessor",
        "modelzoo_trainer.data",
        "my.modelzoo_trainer.data.DigitsProcessor",
        "./modelzoo_trainer.data.DigitsProcessor",
    ],
)
def test_other_texts_are_not_noted(path: str) -> None:
    text = FILE.replace("models.fc", "zoo.models.fc").replace("callbacks.flags", "callbacks")
    text = text.replace("modelzoo_trainer.data.digits.", "")
    assert notes_of(text % f"'{path}'") == []


def test_a_former_path_in_a_preprocessing_file_is_noted() -> None:
    text = "setup: {mode: pretraining}\n"
    text += "processing: {read_hook: modelzoo_trainer.preprocessing.hooks:text_read_hook}\n"
    _, (note,) = parse_settings(text, "data.yaml")
    assert note.startswith("data.yaml:2:25: processing.read_hook: ")
    assert " is now modelzoo_trainer.zoo.rows.preprocessing.hooks:text_read_hook; " in note


@pytest.mark.parametrize("words", [("check",), ("fit",)])
def test_a_check_and_a_run_print_them(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(FILE % "run")
    assert main([*words, "p.yaml"]) == 0
    printed = "".join(capsys.readouterr())
    for path in (
        "models.fc_mnist.FcMnist",
        "callbacks.flags.GlobalFlags",
        "data.digits.DigitsProcessor",
    ):
        assert printed.count(f" is now modelzoo_trainer.zoo.{path}; ") == 1
