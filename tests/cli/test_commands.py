"""Sub-commands: what they run, beside the options without a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from modelzoo_trainer import __version__, checkpointing
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.cli.parser import COMMANDS, parse
from modelzoo_trainer.config.modes import MODES
from modelzoo_trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: out
    model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 2, eval_steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
    val_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
  validate:
    val_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
  validate_all:
    val_dataloaders: {data_processor: DigitsProcessor, batch_size: 2}
"""


@pytest.fixture(autouse=True)
def params(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE)
    return tmp_path / "params.yaml"


def metrics(folder):
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "loss") if key in line} for line in lines]


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_fit_trains_as_the_options_without_a_command_do():
    assert main(["fit", "params.yaml", "-o", "new"]) == 0
    assert main(["--params", "params.yaml", "--model_dir", "old"]) == 0
    assert metrics("new") == metrics("old")
    assert [line["step"] for line in metrics("new") if "loss" in line] == [1, 2]


def test_validate_and_validate_all_run_their_sections_on_checkpoints(capsys):
    assert main(["fit", "params.yaml", "--set", "init.checkpoint.steps=1"]) == 0
    Path("out/metrics.jsonl").unlink()
    assert main(["validate", "params.yaml", "--checkpoint_path", "out/checkpoint_1"]) == 0
    assert [line["step"] for line in metrics("out")] == [1]
    assert main(["validate_all", "params.yaml"]) == 0
    assert [line["step"] for line in metrics("out")] == [1, 1, 2]
    assert main(["validate_all", "params.yaml", "--checkpoint_path", "last"]) == 0
    assert [line["step"] for line in metrics("out")] == [1, 1, 2, 2]
    several = "validate_all.ckpt_paths=[last, out/checkpoint_1]"
    assert main(["validate_all", "params.yaml", "--set", several]) == 0
    assert [line["step"] for line in metrics("out")] == [1, 1, 2, 2, 2, 1]
    one, all_of = (
        main([method, "params.yaml", "--checkpoint_path", "best"])
        for method in ("validate", "validate_all")
    )
    assert one == all_of > 0
    assert capsys.readouterr().err.count("SaveBest") == 2


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_that_of_a_command(mode):
    method = MODES[mode]
    options = parse([method, "params.yaml", *(["--mode", mode] if method == "fit" else [])])
    assert (options.action, options.mode, options.params) == ("run", mode, Path("params.yaml"))
    assert method in COMMANDS


def test_fit_validates_as_well_by_default():
    assert parse(["fit", "params.yaml"]).mode == "train_and_eval"
    assert parse(["-p", "params.yaml"]).mode == "train_and_eval"


def test_the_words_of_cszoo_work(capsys):
    cluster = ["--num_csx=2", "--job_labels", "a=1", "b=2", "--disable_version_check"]
    words = ["fit", "params.yaml", "--target_device=CPU", "-o", "new", "--logging=warning"]
    assert main([*words, *cluster]) == 0
    err = capsys.readouterr().err
    for option in ("--num_csx", "--job_labels", "--disable_version_check"):
        assert err.count(f"note: {option}: no effect") == 1
    assert [line["step"] for line in metrics("new") if "loss" in line] == [1, 2]


def test_validate_only_checks_and_runs_nothing(capsys):
    assert main(["validate", "params.yaml", "--validate_only"]) == 2  # no checkpoint yet
    assert "eval (validate)" in capsys.readouterr().out
    assert not Path("out").exists()


def test_python_paths_are_searched_for_modules(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "zoo_of_python_paths.py").write_text(
        "from modelzoo_trainer.zoo.models.registry import model_class\n"
        "class OwnModel(model_class('fc_mnist')): ...\n"
    )
    given = FILE.replace("name: fc_mnist", "name: OwnModel")
    Path("params.yaml").write_text(given)
    words = ["check", "params.yaml", "--import", "zoo_of_python_paths"]
    assert main(words) == 2
    before = list(sys.path)
    words = ["fit", "params.yaml", "--import", "zoo_of_python_paths", "--python_paths", "code"]
    assert main(words) == 0
    assert sys.path == before


def test_check_is_the_option_check(capsys):
    assert main(["check", "params.yaml", "--explain-hooks"]) == 0
    by_command = capsys.readouterr().out
    assert main(["-p", "params.yaml", "--explain-hooks"]) == 0
    assert capsys.readouterr().out == by_command
    assert "on_train_batch_end" in by_command
    assert main(["check", "params.yaml", "--set", "init.loop.max_stpes=1"]) == 2
    assert "max_stpes" in capsys.readouterr().err


def test_check_takes_the_first_section_of_a_file_and_a_mode(capsys):
    Path("params.yaml").write_text(FILE.replace("  fit:", "  validate_all:", 1).split("  val")[0])
    assert parse(["check", "params.yaml"]).mode is None
    assert parse(["check", "params.yaml", "-m", "eval_all"]).mode == "eval_all"


@pytest.mark.slow
def test_plan_and_schema_are_the_options_of_that_name(capsys):
    words = ["params.yaml", "--world-size", "2", "--memory", "1GiB"]
    assert main(["plan", *words]) == 0
    assert "It fits" in capsys.readouterr().out
    assert main(["plan", "params.yaml", "--memory", "1KiB"]) == 1
    capsys.readouterr()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["trainer"]


def test_compile_only_is_of_fit_too(capsys):
    assert main(["fit", "params.yaml", "--compile_only"]) == 0
    assert "graphs" in capsys.readouterr().err
    assert not Path("out").exists()


def test_checkpoint_runs_the_commands_of_checkpoints(capsys):
    import torch

    for step in (1, 2):
        state = {"model": {"w": torch.zeros(2)}, "global_step": step}
        checkpointing.save(Path(f"checkpoint_{step}").absolute(), state, step=step)
    assert main(["checkpoint", "list", "."]) == 0
    assert "checkpoint_2" in capsys.readouterr().out
    assert main(["checkpoint", "diff", "checkpoint_1", "checkpoint_2"]) == 1
    assert main(["checkpoint", "verify", "no_such_folder"]) == 2
    capsys.readouterr()
    assert refused(capsys, "checkpoint", "lst").startswith("usage: modelzoo-trainer checkpoint ")


def of_report(monkeypatch, run):
    """Put a module in the place of the one that writes reports."""
    module = ModuleType("modelzoo_trainer.tools.report.command")
    module.add_arguments = lambda parser: parser.add_argument("folders", nargs="+")
    module.run = run
    monkeypatch.setitem(sys.modules, "modelzoo_trainer.tools.report", ModuleType("report"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_report_gets_its_arguments_and_its_exit_code_is_kept(monkeypatch):
    given = []
    of_report(monkeypatch, lambda options: given.append(options.folders) or 7)
    assert main(["report", "a", "b"]) == 7
    assert given == [["a", "b"]]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a: no metrics"), 2, "a: no metrics"),
        (PermissionError(13, "denied", "report.html"), 1, "report.html"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_report_raises_is_an_exit_code(monkeypatch, capfd, error, code, said):
    def run(options):
        raise error

    of_report(monkeypatch, run)
    assert main(["report", "a"]) == code
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"modelzoo-trainer {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fti", "params.yaml"], "'fit'"),
        (["train", "params.yaml"], "'fit'"),
        (["eval", "params.yaml"], "'validate'"),
        (["params.yaml"], "modelzoo-trainer fit params.yaml"),
        (["zzz"], ", ".join(COMMANDS)),
        (["fit"], "FILE"),
        (["fit", "--params", "params.yaml"], "modelzoo-trainer fit params.yaml"),
        (["fit", "params.yaml", "--check"], "modelzoo-trainer check params.yaml"),
        (["fit", "params.yaml", "--world-size", "2"], "modelzoo-trainer plan params.yaml"),
        (["validate", "params.yaml", "--mode", "train"], "--mode train"),
        (["fit", "params.yaml", "--mode", "eval"], "'eval'"),
        (["check", "params.yaml", "--epochs", "1"], "--num_epochs"),
        (["schema", "params.yaml"], "params.yaml"),
        (["--params", "params.yaml", "fit"], "fit"),
    ],
)
def test_an_invalid_command_is_2_with_what_to_write(capsys, words, said):
    assert said in refused(capsys, *words)


@pytest.mark.parametrize("start", [["run.py"], ["-m", "modelzoo_trainer"]])
def test_commands_start_in_every_way_and_answer_without_torch(start, tmp_path):
    (tmp_path / "broken.yaml").write_text("a: [\n")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *start, "fit", str(tmp_path / "broken.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2
    assert "broken.yaml:2:1" in done.stderr
    assert "| modelzoo_trainer.cli.parser" in done.stderr.replace("  ", "")
    assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]


NET = """\
import itertools
import os
from pathlib import Path
import torch
from modelzoo_trainer import Callback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return {"loss": (self.weight * batch).sum()}

class batches:
    def __iter__(self):
        yield torch.ones(1)
        Path("training").touch()  # the fit asks for its second batch
        yield from itertools.repeat(torch.ones(1))

class DieOnce(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == 5 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
"""
REAL = """\
trainer:
  init:
    device: cpu
    model_dir: out
    model: {zoo_of_commands.Net: {}}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 1000000, eval_frequency: null}
    logging: {log_steps: 1000}
  fit:
    train_dataloader: {data_processor: zoo_of_commands.batches}
"""


@pytest.fixture
def started(tmp_path):
    """Return a function that starts `run.py` with words on an endless run."""
    Path("zoo_of_commands.py").write_text(NET)
    Path("params.yaml").write_text(REAL)
    processes = []

    def start(*words, before=()):
        process = subprocess.Popen(
            [*(before or [sys.executable]), str(ROOT / "run.py"), *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_signal_ends_a_command_with_its_code_and_a_checkpoint(started, tmp_path):
    process = started("fit", "params.yaml")
    deadline = time.monotonic() + 120
    while not Path("training").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert list(Path("out").glob("checkpoint_*"))


@pytest.mark.slow
def test_a_command_is_restarted_with_its_words(started):
    changes = ["init.callbacks=[zoo_of_commands.DieOnce: {}]", "init.checkpoint.steps=2"]
    changes += ["init.autorestart.max_num_restarts=1"]
    words = ["fit", "params.yaml", "--max_steps=8", *(f"--set={change}" for change in changes)]
    process = started(*words)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    [ledger] = Path("out/restarts").glob("*/ledger.json")
    told = json.loads(ledger.read_text())
    assert [one["outcome"] for one in told["attempts"]] == ["killed", "done"]
    assert [one["start_step"] for one in told["attempts"]] == [0, 4]
    assert told["command"][1:] == words
    kept = Path("out/logs/latest/params.yaml").read_text()
    assert "run.py fit params.yaml" in kept
    assert "--supervised" not in kept


@pytest.mark.slow
def test_a_command_runs_under_torchrun(started):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = started("fit", "params.yaml", "--max_steps=2", "--num_csx=1", before=launch)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert err.count("note: --num_csx") == 1
    assert metrics("out")[-1]["step"] == 2
