"""`--mode test` and `--mode predict` from the command line, on the digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import Predictions
from modelzoo_trainer.cli.command import main

FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: out
    model: {name: fc_mnist, hidden_sizes: [8], input_size: 64}
    optimizer: {AdamW: {lr: 0.01}}
    loop: {max_steps: 4, eval_frequency: epoch, eval_steps: 1}
    checkpoint: {steps: 4}
    logging: {log_steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 64}
  test:
    dataloader: &val {data_processor: DigitsProcessor, split: val, batch_size: 50}
  predict:
    dataloader: *val
"""

KEEPS = """\
from modelzoo_trainer import Callback


class Keeps(Callback):
    def setup(self, trainer):
        (trainer.model_dir / "kept.txt").write_text("")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function from options to the exit code, in a folder with a file."""
    monkeypatch.chdir(tmp_path)

    def start(*options, text=FILE):
        Path("params.yaml").write_text(text)
        return main(["--params", "params.yaml", *options])

    return start


def metrics():
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def test_a_trained_model_is_tested_and_predicts(run):
    assert run("--mode", "train") == 0
    assert run("--mode", "test") == 0
    assert [line["step"] for line in metrics() if "test/loss" in line] == [4]
    assert run("--mode", "predict") == 0
    logged = "".join(path.read_text() for path in Path("out/logs").glob("*/run.log"))
    assert "Saved predictions to out/predictions" in logged
    found = Predictions.load("out/predictions")
    assert found.num_samples > 100
    assert found["logits"].shape == (found.num_samples, 10)
    assert torch.isfinite(found["logits"]).all()


def test_eval_steps_and_output_dir_are_those_of_the_section(run):
    assert run("--mode", "train") == 0
    assert run("--mode", "predict", "--eval_steps", "2", "--set", "predict.output_dir=there") == 0
    assert Predictions.load("there").num_samples == 100
    assert run("--mode", "predict", "--set", "predict.output_dir=null") == 0
    assert Predictions.load("out/predictions").num_samples > 100
    assert run("--mode", "test", "--eval_steps", "1") == 0


@pytest.mark.parametrize("mode", ["test", "predict"])
def test_without_weights_they_are_refused(run, capsys, mode):
    assert run("--mode", mode) == 2
    told = capsys.readouterr().err
    assert f"no weights to {mode}" in told
    assert f"{mode}.ckpt_path" in told
    assert run("--mode", mode, "--set", f"{mode}.ckpt_path=null") == 0


@pytest.mark.parametrize("options", [[], ["best"], ["last"]])
@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("mode", ["test", "predict"])
@pytest.mark.slow_cases(every=4)
def test_a_folder_without_a_checkpoint_is_refused_and_not_created(
    run, capsys, mode, is_folder, options
):
    if is_folder:
        Path("out").mkdir()
    assert run("--mode", mode, *(f"--checkpoint_path={name}" for name in options)) == 2
    told = capsys.readouterr().err
    assert "there is no checkpoint in" in told
    assert "Error" not in told
    assert "Mismatch" not in told
    assert Path("out").exists() == is_folder


def test_a_new_folder_stays_if_a_logger_has_written_to_it(run):
    text = FILE.replace("logging:", "callbacks: [{Keeps: {}}]\n    logging:")
    Path("keeps.py").write_text(KEEPS)
    assert run("--mode", "predict", "--import", "keeps", text=text) == 2
    assert Path("out/kept.txt").exists()


@pytest.mark.parametrize("mode", ["test", "predict"])
def test_a_file_without_the_section_is_refused(run, capsys, mode):
    text = FILE.partition("  test:")[0]
    assert run("--mode", mode, text=text) == 2
    assert f"trainer.{mode}: missing; the command '{mode}' " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("predict.dataloaders={}", "predict.dataloaders: no such key"),
        ("predict.dataloader=null", "predict.dataloader"),
        ("predict.eval_steps=0", "predict.eval_steps: "),
        ("predict.output_dir=[a]", "predict.output_dir: "),
        ("test.output_dir=a", "test.output_dir: no such key"),
        ("init.call_model=dict", "init.call_model: "),
        ("init.loop.eval_frequency=epochs", "init.loop.eval_frequency: "),
    ],
)
def test_what_does_not_fit_is_found_in_any_mode(run, capsys, change, told):
    assert run("--check", "--set", change) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("test", ["mode: test", "test: all batches of one dataloader"]),
        (
            "predict",
            ["mode: predict", "predictions: all batches of one", "output_dir: predictions"],
        ),
    ],
)
def test_a_check_lists_what_would_run(run, capsys, mode, lines):
    assert run("--check", "--mode", mode, "--set", "init.call_model=batch") == 2  # no checkpoint
    shown = " ".join(capsys.readouterr().out.split())
    for line in [*lines, "call_model: batch", "ckpt_path"]:
        assert line in shown


def test_a_check_without_a_mode_takes_what_there_is(run, capsys):
    head, _, tail = FILE.partition("  fit:")
    assert (
        run("--check", text=head + "  test:" + tail.partition("  test:")[2]) == 2
    )  # no checkpoint
    assert "mode: test" in " ".join(capsys.readouterr().out.split())


def test_compile_only_writes_no_predictions(run, tmp_path):
    change = ("--set", "predict.output_dir=there")
    assert run("--mode", "predict", "--compile-only", *change) == 0
    assert not Path("there").exists()
    assert not Path("out").exists()


@pytest.mark.parametrize("call", ["args", "kwargs"])
def test_a_call_that_does_not_fit_the_model_is_refused(run, capsys, call):
    assert run("--set", f"init.call_model={call}", "--mode", "train") == 2
    assert "call_model" in capsys.readouterr().err
    assert run("--set", "init.call_model=batch", "--mode", "train") == 0


def test_the_best_checkpoint_is_named_on_the_command_line(run):
    best = FILE.replace(
        "    logging:",
        "    callbacks:\n    - SaveBest: {metric: validate_0/loss, mode: max}\n    logging:",
    ).replace("eval_frequency: epoch", "eval_frequency: 1")
    fit = (
        "  fit:\n    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 50}"
    )
    best = best.replace("  fit:", fit)
    assert run("--mode", "train_and_eval", text=best) == 0
    [path] = Path("out").glob("best_*")  # of the first step: the loss decreases
    step = int(path.name.removeprefix("best_"))
    assert step < 4
    assert run("--mode", "test", "--checkpoint_path", "best", text=best) == 0
    assert run("--mode", "test", "--checkpoint_path", "last", text=best) == 0
    assert [line["step"] for line in metrics() if "test/loss" in line] == [step, 4]
    in_file = best.replace("  test:", "  test:\n    ckpt_path: best")
    assert run("--mode", "test", text=in_file) == 0
    assert [line["step"] for line in metrics() if "test/loss" in line][2:] == [step]
