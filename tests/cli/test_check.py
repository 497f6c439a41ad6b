"""What the command line says of a file without running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.core import artifact_dir

FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
    optimizer: {SGD: {lr: 0.1}}
    precision: {fp16_type: cbfloat16}
    loop: {max_steps: 4, eval_frequency: null}
    %s
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function from options, and a file's text, to the exit code."""
    monkeypatch.chdir(tmp_path)

    def start(*options, text=FILE % ""):
        Path("params.yaml").write_text(text)
        return main(["--params", "params.yaml", *options])

    return start


def test_a_check_lists_what_would_run_and_builds_nothing(run, capsys, monkeypatch):
    def built(self, *args, **kwargs):
        raise AssertionError("a module was built")

    monkeypatch.setattr(nn.Module, "__init__", built)
    assert run("--check") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("params.yaml is valid")
    for text in ("FcMnist", "hidden_sizes", "SGD", "DigitsProcessor", "cbfloat16 is bfloat16"):
        assert text.lower() in out.lower()
    assert [path.name for path in Path().iterdir()] == ["params.yaml"]


def test_the_order_of_callbacks_is_explained(run, capsys):
    assert run("--explain-hooks", text=FILE % "callbacks: [{KeepNCheckpoints: {n: 1}}]") == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "on_after_save_checkpoint" in line)
    assert "KeepNCheckpoints" in out[out.index(line) :]


def test_a_check_refuses_what_a_run_refuses(run, capsys):
    assert run("--check", text=(FILE % "").replace("max_steps", "max_stpes")) == 2
    assert capsys.readouterr().err.startswith("params.yaml:8:12: trainer.init.loop.max_stpes: no")


DOTTED = (FILE % "").replace("{SGD: {lr", "{torch.optim.SGD: {lr")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("init.optimizer.torch.optim.SGD.momentun=1", ["SGD.momentun: ", "'momentum'"]),
        ("init.optimizer.torch.optim.SGD.momentum=-1", ["optimizer.torch.optim.SGD: ", "-1.0"]),
        ("init.optimizer.SGD.lr=1", ["init.optimizer.torch.optim.SGD.ARGUMENT=VALUE"]),
        ("init.optimizer.lr=1", ["init.optimizer.torch.optim.SGD.ARGUMENT=VALUE"]),
        ("init.optimizer=null", ["init.optimizer: missing"]),
        ("init.model=null", ["init.model: missing"]),
        ("init.model={tests.Net: {a: 1}, b: 2}", ["init.model: ", "'tests.Net', 'b'"]),
        ('init.model={"torch": {nn.Linear: {a: 1}}}', ["'torch'", '."pkg.Class".']),
        ("fit.train_dataloader.batch_size=0", ["fit.train_dataloader.batch_size: "]),
    ],
)
def test_an_error_of_a_change_names_its_option(run, capsys, change, facts):
    assert run("--set", "fit.val_dataloader=null", "--set", change, text=DOTTED) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--set {change}: trainer.")
    assert all(fact in line for fact in facts), line


def test_a_class_that_a_change_made_fail_names_its_option(run, capsys):
    change = "init.optimizer.torch.optim.SGD.params=[{params: x*}]"
    text = DOTTED.replace("lr: 0.1", "lr: 0.1, momentum: 0.9")
    assert run("--set", change, text=text) == 2
    assert f"--set {change}: trainer.init.optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--check", "--device=cpu"])
def test_the_first_100_problems_are_printed_and_the_others_counted(run, capsys, option):
    unknown = "\n    ".join(f"odd_{number}: 1" for number in range(1_234))
    assert run(option, text=FILE % unknown) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 1,134 more"


def test_a_check_finds_the_mode_that_the_file_is_for(run, capsys):
    text = (FILE % "").replace("  fit:\n    train_", "  validate:\n    val_")
    assert run("--check", "--set", "validate.ckpt_path=null", text=text) == 0
    assert "eval" in capsys.readouterr().out
    assert run(text=text) == 2
    assert "trainer.fit: missing; the command 'fit' requires" in capsys.readouterr().err


def test_a_file_that_only_describes_is_valid_but_no_command_runs_it(run, capsys):
    assert run("--check", text=(FILE % "").partition("  fit:")[0]) == 2
    assert "there is nothing to run" in capsys.readouterr().out


def test_each_trainer_of_a_list_is_listed(run, capsys):
    one = "\n".join(f"    {line}" for line in (FILE % "").splitlines())
    two = f"trainer:\n{one.replace('    trainer:', '  - trainer:', 1)}\n"
    text = two + one.replace("    trainer:", "  - trainer:", 1).replace("SGD", "AdamW") + "\n"
    assert run("--check", text=text) == 0
    out = capsys.readouterr().out
    assert out.index("Trainer 1 of 2") < out.index("SGD")
    assert out.index("Trainer 2 of 2") < out.index("AdamW")


def test_a_run_says_once_what_has_no_effect_and_keeps_it(run, capsys):
    assert run("--model_dir", "out", "--max_steps", "2") == 0
    note = "params.yaml:7:5: trainer.init.precision: fp16_type cbfloat16 is bfloat16 here.\n"
    assert capsys.readouterr().err.count(f"note: {note}") == 1
    kept = Path("out/logs/latest/params.yaml").read_text()
    assert f"# note: {note}" in kept
    assert "# command: modelzoo-trainer --params params.yaml --model_dir out --max_steps 2" in kept


def test_a_copy_that_cannot_be_written_ends_no_run(run, capsys, monkeypatch):
    monkeypatch.setattr(artifact_dir, "PARAMS", "no/such/folder")
    assert run("--model_dir", "out", "--max_steps", "2") == 0
    assert capsys.readouterr().err.count("no/such/folder: No such file or directory.") == 1
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2


def test_what_was_kept_runs_again(run, capsys):
    assert run("--model_dir", "out", "--max_steps", "2") == 0
    kept = Path("out/logs/latest/params.yaml").read_text()
    assert run("--model_dir", "again", text=kept) == 0
    ends = [Path(name, "metrics.jsonl").read_text().splitlines() for name in ("out", "again")]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in ends]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_the_schema_is_printed_without_a_file(capsys):
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["trainer"]


def test_a_file_of_the_older_layout_runs_and_shows_todays(run, capsys):
    text = """\
train_input: {data_processor: DigitsProcessor, batch_size: 2}
model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
optimizer: {optimizer_type: SGD, learning_rate: 0.1}
runconfig: {max_steps: 2, model_dir: out, target_device: CPU}
"""
    assert run(text=text) == 0
    err = capsys.readouterr().err
    assert "params.yaml:1:1: has the older layout" in err
    assert ":\n\ntrainer:\n  init:\n" in err
    assert run(text=text.replace("max_steps", "max_stpes")) == 2
    assert capsys.readouterr().err.startswith("params.yaml:4:13: runconfig.max_stpes: no such key")
