"""Options of the command line as changes of the file."""

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.config.overrides import apply_overrides, changes_of
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.errors import ConfigError

FILE = """\
trainer:
  init:
    backend: {backend_type: CSX, compile: true}
    loop: {num_epochs: 2, eval_steps: 3}
    callbacks: [{KeepNCheckpoints: {n: 1}}]
  fit: {train_dataloader: a}
  validate_all: {}
"""


def changed(text=FILE, mode="train_and_eval", **options):
    root = read_text(text, "f.yaml")
    return to_plain(apply_overrides(root, changes_of(options, mode, root)))["trainer"]


def test_each_option_has_a_change():
    value = {option.name: "1" for option in OPTIONS}
    root = read_text(FILE, "f.yaml")
    assert len(changes_of(value, "train", root)) == len(OPTIONS) + 1  # backend_type as well


def test_a_device_replaces_the_backend_type_and_leaves_the_options():
    init = changed(device="cpu")["init"]
    assert init["device"] == "cpu"
    assert init["backend"] == {"backend_type": None, "compile": True}


@pytest.mark.parametrize("name", ["max_steps", "num_steps"])
def test_a_length_replaces_every_length_of_the_file(name):
    loop = changed(**{name: "10"})["init"]["loop"]
    assert loop == {"num_epochs": None, "eval_steps": 3, name: 10}


def test_two_lengths_are_both_kept():
    loop = changed(max_steps="10", num_epochs="3")["init"]["loop"]
    assert loop == {"num_epochs": 3, "eval_steps": 3, "max_steps": 10}


def test_the_other_options_go_where_they_belong():
    trainer = changed(
        model_dir="there",
        eval_steps="7",
        logging="debug",
        disable_strict_checkpoint_loading="true",
        load_checkpoint_states="model,optimizer",
        checkpoint_path="runs/a: b",
    )
    init = trainer["init"]
    assert init["model_dir"] == "there"
    assert init["loop"]["eval_steps"] == 7
    assert init["logging"] == {"log_level": "DEBUG"}
    assert init["checkpoint"] == {"disable_strict_checkpoint_loading": True}
    assert init["callbacks"][1] == {
        "LoadCheckpointStates": {"load_checkpoint_states": "model,optimizer"}
    }
    assert trainer["fit"]["ckpt_path"] == "runs/a: b"


@pytest.mark.parametrize(
    ("mode", "places"),
    [
        ("train", ["fit"]),
        ("eval", ["validate"]),
        ("eval_all", ["validate_all"]),
        (None, ["fit", "validate_all"]),
    ],
)
def test_a_checkpoint_goes_to_the_section_that_runs(mode, places):
    trainer = changed(mode=mode, checkpoint_path="a")
    found = [
        section
        for section in ("fit", "validate", "validate_all")
        if {"ckpt_path", "ckpt_paths"} & set(trainer.get(section, ()))
    ]
    assert found == places


def test_a_checkpoint_for_one_of_several_trainers_is_refused():
    text = "trainer: [{trainer: {init: {}}}, {trainer: {init: {}}}]"
    with pytest.raises(ConfigError, match=r"the file has 2 trainers\.") as caught:
        changed(text, checkpoint_path="a")
    assert "--set trainer[0].fit.ckpt_path=a" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        changed(text, "eval_all", checkpoint_path="a")
    assert "--set trainer[0].validate_all.ckpt_paths=a" in str(caught.value)
