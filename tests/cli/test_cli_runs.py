"""Whole runs from the command line, one after another, on the digits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modelzoo_trainer.cli.command import main

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: out
    model: {name: fc_mnist, hidden_sizes: [8], input_size: 64}
    optimizer: {AdamW: {}}
    schedulers:
      - CosineDecayLR: {initial_learning_rate: 0.01, end_learning_rate: 0.0, total_iters: 4}
    loop: {max_steps: 4, eval_frequency: 2}
    checkpoint: {steps: 2}
    logging: {log_steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 64}
    val_dataloader: &val {data_processor: DigitsProcessor, split: val, batch_size: 90}
  validate: {val_dataloader: *val}
  validate_all: {val_dataloaders: *val}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function from options to the exit code, in a folder with a file."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE)

    def start(*options):
        return main(["--params", "params.yaml", *options])

    return start


def validations():
    lines = map(json.loads, Path("out/metrics.jsonl").read_text().splitlines())
    return [(one["step"], one["validate_0/loss"]) for one in lines if "validate_0/loss" in one]


def test_a_run_with_a_schedule_is_validated_afterwards(run):
    assert run() == 0
    trained = validations()
    assert run("--mode", "eval") == 0
    assert validations() == [*trained, trained[-1]]


def test_all_checkpoints_are_validated_unless_some_are_named(run):
    assert run() == 0
    trained = validations()
    assert run("--mode", "eval_all") == 0
    assert validations()[2:] == trained
    assert run("--mode", "eval_all", "--checkpoint_path", "out/checkpoint_2") == 0
    assert validations()[4:] == trained[:1]


def test_no_checkpoint_at_all_is_refused(run, capsys):
    assert run("--mode", "eval_all") == 2
    assert re.search(r"There is no checkpoint in '.*out' to validate\.", capsys.readouterr().err)


def test_a_validation_without_weights_is_refused_unless_null_is_given(run, capsys):
    assert run("--mode", "eval") == 2
    said = capsys.readouterr().err
    assert re.search(r"no weights to validate: .* no checkpoint in '.*out'", said)
    assert "--checkpoint_path" in said
    assert run("--mode", "eval", "--check") == 2
    assert "invalid: no checkpoint in model_dir" in capsys.readouterr().out
    assert run("--mode", "eval", "--set", "validate.ckpt_path=null") == 0
    assert len(validations()) == 1


def test_a_missing_checkpoint_is_answered_with_those_of_its_folder(run, capsys):
    assert run() == 0
    capsys.readouterr()
    assert run("--mode", "eval", "--checkpoint_path", "out/checkpoint_99") == 2
    said = capsys.readouterr().err
    assert "'out/checkpoint_99' does not exist" in said
    assert "checkpoint_2" in said
    assert run("--mode", "eval", "--checkpoint_path", "uot/checkpoint_2") == 2
    assert "no folder 'uot'" in capsys.readouterr().err


def test_a_validation_without_autoload_is_refused_unless_a_checkpoint_is_named(run, capsys):
    assert run() == 0
    no_autoload = ("--mode", "eval", "--set", "init.checkpoint.autoload_last_checkpoint=false")
    assert run(*no_autoload) == 2
    assert "autoload_last_checkpoint is false" in capsys.readouterr().err
    assert run(*no_autoload, "--checkpoint_path", "out/checkpoint_2") == 0


@pytest.mark.parametrize("mode", ["eval", "eval_all"])
def test_graphs_of_a_validation_are_compiled_without_a_checkpoint(run, mode):
    assert run("--mode", mode, "--compile-only") == 0


def test_what_fits_is_loaded_if_the_check_is_not_strict(run, caplog):
    assert run() == 0
    other = ["--model_dir", "other", "--checkpoint_path", "out/checkpoint_4"]
    wider = ["--set", "init.model.num_classes=11", "--load_checkpoint_states", "model"]
    assert run(*other, *wider) == 1
    with caplog.at_level("WARNING", "modelzoo_trainer"):
        assert run(*other, *wider, "--disable_strict_checkpoint_loading") == 0
    assert "the shapes differ: layers.2.bias, layers.2" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("init.model.hidden_sizes=[1000000000000000000]", "trainer.init.model: its sizes are too"),
        ("init.model.input_size=100000000000000000000", "trainer.init.model: its sizes are too"),
        (
            "fit.train_dataloader={data_processor: SyntheticProcessor, batch_size: 4, "
            "num_samples: 1000000000000000000}",
            "trainer.fit.train_dataloader: its sizes are too",
        ),
        ('init.model_dir="a\\0b"', "init.model_dir=.*null character"),
        ("init.checkpoint.checkpoint_name=.{step}", "checkpoint_name is"),
        ("init.seed=1.5", "trainer.init.seed: expected .*4294967296.*, got 1.5"),
        ("init.seed=a", "trainer.init.seed: expected .*, got 'a'"),
        ("init.seed=4294967296", "trainer.init.seed: expected .*, got 4294967296"),
        (
            "fit.train_dataloader.shuffle_seed=100000000000000000000",
            "shuffle_seed: .*, got 1000",
        ),
    ],
)
def test_what_no_machine_can_do_is_refused_in_one_line_with_exit_code_2(
    run, capsys, change, message
):
    assert run("--set", change) == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert "Traceback" not in said
    assert list(Path("out").glob("*.json*")) == list(Path("out").glob("checkpoint_*")) == []


@pytest.mark.parametrize("value", ["", "null", "~"])
def test_a_length_without_a_number_is_refused(run, capsys, value):
    assert run("--max_steps", value) == 2
    assert "requires a number." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--checkpoint_path", "none"],
            "--checkpoint_path none: trainer.fit.ckpt_path: checkpoint 'none'",
        ),
        (["--checkpoint_path", ""], "--checkpoint_path : trainer.fit.ckpt_path: is empty."),
        (
            ["--set", "init.seed=-1"],
            "--set init.seed=-1: trainer.init.seed: expected an integer in "
            "[0, 4294967296) or null, got -1.",
        ),
        (["--set", "fit.val_dataloader=[]"], "--set fit.val_dataloader=[]: trainer.fit.val_datal"),
        (
            ["--set", "init.checkpoint.checkpoint_name='c_{step:03d}'"],
            "--set init.checkpoint.checkpoint_name='c_{step:03d}': trainer.init.checkpoint.checkpo",
        ),
        (
            ["--set", "init.optimizer={torch.optim.SGD: {lr: -1}}"],
            "--set init.optimizer={torch.optim.SGD: {lr: -1}}: trainer.init.optimizer.torch.optim",
        ),
        (
            ["--set", "init.optimizer={torch.optim.LBFGS: {}}"],
            "--set init.optimizer={torch.optim.LBFGS: {}}: trainer.init.optimizer.torch.optim.LBF",
        ),
        (
            ["--set", "init.optimizer={torch.nn.Linear: {}}"],
            "--set init.optimizer={torch.nn.Linear: {}}: trainer.init.optimizer.torch.nn.Linear: ",
        ),
        (
            ["--set", "init.schedulers=[{torch.optim.lr_scheduler.StepLR: {step_size: 0}}]"],
            "--set init.schedulers=[{torch.optim.lr_scheduler.StepLR: {step_size: 0}}]: trainer.i",
        ),
        (
            ["--set", "init.callbacks=[{modelzoo_trainer.TrainingLoop: {}}]"],
            "--set init.callbacks=[{modelzoo_trainer.TrainingLoop: {}}]: trainer.init.callbacks[0",
        ),
    ],
)
def test_what_a_run_would_stumble_over_is_refused_before_it(run, capsys, options, message):
    assert run(*options) == 2
    assert capsys.readouterr().err.startswith(message)
    assert [path.name for path in Path().iterdir()] == ["params.yaml"]


def test_a_file_that_is_too_large_is_not_read(run, capsys):
    Path("params.yaml").write_text("a: " + "b" * 2**20)
    assert run() == 2
    assert capsys.readouterr().err == "params.yaml: is larger than 1 MiB.\n"


def test_classes_that_a_module_only_imports_are_not_its_own(run, tmp_path, monkeypatch):
    Path("zoo_imports.py").write_text(
        "from torch.optim import AdamW\n"
        "from modelzoo_trainer import Callback\n\n"
        "class clash(Callback):\n    def __init__(self, a: int): ...\n\n"
        "class Clash(Callback):\n    def __init__(self, b: int): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one = ["--import", "zoo_imports", "--max_steps", "1"]
    assert run(*one, "--set", "init.callbacks=[{Clash: {b: 2}}, {clash: {a: 2}}]") == 0
    kept = Path("out/logs/latest/params.yaml").read_text()
    assert "and the --import options below" in kept


@pytest.mark.parametrize("method", ["", "    def create_dataloader(self):\n        return self\n"])
def test_a_data_set_named_in_a_file_is_refused(run, tmp_path, monkeypatch, capsys, method):
    Path(f"rows_{len(method)}.py").write_text(
        "import torch\n\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __getitem__(self, index): return torch.ones(64), torch.tensor(1)\n" + method
    )
    monkeypatch.syspath_prepend(tmp_path)
    loader = f"fit.train_dataloader={{data_processor: rows_{len(method)}.Rows}}"
    assert run("--set", loader) != 0
    assert "train_dataloader got the dataset Rows" in capsys.readouterr().err


# ---- modules of the user's, without PYTHONPATH

MINE = """\
import sys
from modelzoo_trainer import Callback

PATH = list(sys.path)

class Mine{0}(Callback):
    pass
"""


@pytest.fixture
def own_modules(run, monkeypatch):
    """A file in a folder, a module beside it, one in the working folder, and a trap."""
    folder = Path("recipes")
    folder.mkdir()
    Path("params.yaml").rename(folder / "params.yaml")
    (folder / "zoo_beside.py").write_text(MINE.format("Beside"))
    Path("zoo_here.py").write_text(MINE.format("Here"))
    Path("backends.py").write_text("raise RuntimeError('not this one')")
    options = ["--params", "recipes/params.yaml", "--check", "--import", "zoo_beside"]
    yield [*options, "--set", "init.callbacks=[{MineBeside: {}}, {zoo_here.MineHere: {}}]"]
    for name in ("zoo_beside", "zoo_here"):
        sys.modules.pop(name, None)


def test_modules_beside_the_file_and_in_the_working_folder_are_found_last(own_modules, capsys):
    before = list(sys.path)
    assert main(own_modules) == 0
    assert "MineBeside" in capsys.readouterr().out
    path = sys.modules["zoo_beside"].PATH
    assert path == [*before, str(Path("recipes").resolve()), str(Path.cwd())]
    assert str(ROOT) in before
    assert sys.path == before


@pytest.mark.slow
@pytest.mark.parametrize("program", ["run.py", "console script"])
def test_programs_find_modules_of_the_user_and_no_backends_of_theirs(own_modules, program):
    script = "import sys; from modelzoo_trainer.cli.command import main; sys.exit(main())"
    words = {"run.py": [str(ROOT / "run.py")], "console script": ["-P", "-c", script]}[program]
    done = subprocess.run(
        [sys.executable, *words, *own_modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MineBeside" in done.stdout


@pytest.mark.slow
def test_the_module_finds_modules_of_the_user(own_modules):
    Path("backends.py").unlink()  # python -m begins with the working folder
    words = ["-m", "modelzoo_trainer", *own_modules]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MineBeside" in done.stdout


def test_whole_numbers_in_other_forms_are_integers_in_the_runs_own_file(run):
    assert run("--set", "init.loop.max_steps=0.2e1", "--set", "init.logging.log_steps=1_0") == 0
    kept = Path("out/logs/latest/params.yaml").read_text()
    assert re.search(r"max_steps: 2$", kept, re.MULTILINE)
    assert re.search(r"log_steps: 10$", kept, re.MULTILINE)
