"""The command `modelzoo-trainer config convert`."""

import pytest

from modelzoo_trainer.cli.command import main

FILE = """\
max_seq_len: 32
model: {name: hf_causal_lm, pretrained_model_name_or_path: ./tiny}
tokenizer: {name: ./tiny}
train_loader: {name: finetuning, dataset: {hf_name: ./data, split: train}}
optimizer: {name: decoupled_adamw, lr: 1.0e-3, weight_decay: 0.0}
scheduler: {name: constant_with_warmup}
max_duration: 10ba
global_train_batch_size: 16
device_train_microbatch_size: 4
"""
EXACT = """\
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t.model, max_seq_len: 64}
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: ./tiny}
dataset: {_component_: torchtune.datasets.text_completion_dataset, source: ./data}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3, weight_decay: 0.0}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
dtype: fp32
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "theirs.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_written_with_the_list_at_its_top(theirs, capfd):
    theirs.write_text(FILE + "my_key: 3\n")
    assert main(["config", "convert", "theirs.yaml", "-o", "ours.yaml"]) == 0
    text = (theirs.parent / "ours.yaml").read_text()
    assert text.startswith("# Converted from theirs.yaml of llm-foundry")
    assert "my_key = 3" in text.partition("trainer:")[0]
    assert "name: hf_causal_lm" in text
    out, err = capfd.readouterr()
    assert out == ""
    assert "my_key = 3" in err


def test_without_a_file_to_write_it_is_printed(theirs, capfd):
    assert main(["config", "convert", "theirs.yaml"]) == 0
    assert "\ntrainer:\n" in capfd.readouterr().out


def test_strict_is_1_if_something_has_no_counterpart(theirs, capfd):
    words = ["config", "convert", "theirs.yaml", "--strict"]
    theirs.write_text(EXACT)
    assert main(words) == 0
    theirs.write_text(EXACT + "tokens: 3\n")
    assert main(words) == 1


def test_an_existing_file_is_not_overwritten(theirs, capfd):
    ours = theirs.parent / "ours.yaml"
    ours.write_text("mine")
    words = ["config", "convert", "theirs.yaml", "-o", "ours.yaml"]
    assert main(words) == 2
    assert "ours.yaml exists" in capfd.readouterr().err
    assert ours.read_text() == "mine"
    assert main([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer: {init: {}}", "needs no conversion"),
        ("a: 1", "looks like a file of none of llm-foundry, torchtune"),
        ("- 1", "expected a mapping"),
    ],
)
def test_another_file_is_refused(theirs, capfd, text, said):
    theirs.write_text(text)
    assert main(["config", "convert", "theirs.yaml"]) == 2
    assert said in capfd.readouterr().err
