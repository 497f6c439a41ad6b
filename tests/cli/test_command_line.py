"""The command line: options, messages, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from backends import BackendUnavailable
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
trainer:
  init:
    device: cpu
    model: {name: tiny_net, hidden_size: 4}
    loop: {max_steps: 3}
  validate:
    val_dataloader: {data_processor: Numbers, batch_size: 2}
    ckpt_path: null
"""


class TinyNet:
    def __init__(self, hidden_size: int) -> None: ...


class Numbers:
    def __init__(self, batch_size: int) -> None: ...


class TrainingLoop:
    def __init__(self, max_steps: int | None = None) -> None:
        self.max_steps = max_steps


def try_backend(device, options):
    if (device or "cpu").lower() not in ("cpu", "gpu", "auto"):
        raise ConfigError(f"device: {device!r} is not a backend. Did you mean 'cpu'?")


class QuickTrainer:
    """Makes its folder, and ends as the test wants."""

    built: ClassVar[list[QuickTrainer]] = []
    error: BaseException | None = None
    error_at_build: BaseException | None = None
    interrupted: str | None = None
    late_signal: str | None = None
    result = SimpleNamespace()

    def __init__(self, *, model_dir="model_dir", **arguments):
        if self.error_at_build is not None:
            raise self.error_at_build
        self.arguments = arguments
        self.model_dir = Path(model_dir)
        self.artifact_dir = self.model_dir / "logs"
        self.artifact_dir.mkdir(parents=True)
        self.backend = SimpleNamespace(comm=SimpleNamespace(is_main=True))
        self.built.append(self)

    def close(self):
        self.is_closed = True

    def validate(self, **call):
        if self.error is not None:
            raise self.error


@pytest.fixture
def trainer(monkeypatch):
    """Return a trainer class that the test may prepare."""
    monkeypatch.setattr(QuickTrainer, "built", [])
    yield QuickTrainer
    for name in ("error", "error_at_build", "interrupted", "late_signal"):
        setattr(QuickTrainer, name, None)


@pytest.fixture
def run(trainer, tmp_path, monkeypatch):
    """Return a function from options, and a file's text, to the exit code."""
    monkeypatch.chdir(tmp_path)

    def names(modules):
        return Names(
            trainer=trainer,
            models=NameTable(
                kind="model", names=("tiny_net",), load=lambda name: TinyNet, modules=modules
            ),
            optimizers=NameTable.of("optimizer", {}),
            schedulers=NameTable.of("scheduler", {}),
            callbacks=NameTable.of("callback", {}),
            loggers=NameTable.of("logger", {}),
            processors=NameTable.of("data processor", {"Numbers": Numbers}),
            sections={"loop": TrainingLoop},
            try_backend=try_backend,
        )

    def start(*options, text=FILE):
        Path("params.yaml").write_text(text)
        return main(["--params", "params.yaml", "--mode", "eval", *options], names=names)

    return start


def python(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=180
    )


def test_a_run_that_ends_is_0_and_its_file_is_kept_with_the_changes(run, trainer):
    assert run("--set", "init.loop.max_steps=7", "--device", "GPU", "--model_dir", "out") == 0
    kept = to_plain(read_file(Path("out/logs/params.yaml")))["trainer"]
    assert kept["init"] == {
        "device": "GPU",
        "model": {"name": "tiny_net", "hidden_size": 4},
        "loop": {"max_steps": 7},
        "model_dir": "out",
    }
    assert trainer.built[0].arguments["device"] == "gpu"
    assert trainer.built[0].arguments["loop"].max_steps == 7


def test_the_kept_file_is_an_input(run):
    assert run("--model_dir", "out") == 0
    kept = Path("out/logs/params.yaml").read_text()
    assert run("--model_dir", "again", text=kept) == 0
    again = Path("again/logs/params.yaml").read_text()
    written, moved = (re.sub(r"written \S+ \S+", "", text) for text in (again, kept))
    assert written == moved.replace("out", "again")


def test_the_device_option_replaces_a_backend_type(run, trainer):
    text = FILE.replace("device: cpu", "backend: {backend_type: gpu, flag: 1}")
    assert run("--device", "cpu", text=text) == 0
    assert trainer.built[0].arguments["device"] == "cpu"
    assert trainer.built[0].arguments["backend"] == {"flag": 1}


def test_a_wrong_file_is_2_with_a_line_for_each_problem_and_nothing_on_disk(run, capfd):
    assert run(text=FILE.replace("max_steps", "max_stpes").replace("cpu", "cpuu")) == 2
    assert capfd.readouterr() == (
        "",
        "params.yaml:3:13: trainer.init.device: 'cpuu' is not a backend. Did you mean 'cpu'?\n"
        "params.yaml:5:12: trainer.init.loop.max_stpes: no such argument of TrainingLoop. "
        "Did you mean 'max_steps'?\n",
    )
    assert sorted(path.name for path in Path().iterdir()) == ["params.yaml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "init.loop.max_stpes=1"], "--set init.loop.max_stpes=1: trainer.init.loop.max_"),
        (["--set", "init.loop"], "--set init.loop: is not of the form PATH=VALUE. Write --set a.b"),
        (["--device", "tpu"], "--device tpu: trainer.init.device: 'tpu' is not a backend. "),
        (["--import", "zoo_nowhere"], "--import: Cannot import 'zoo_nowhere'"),
        (
            ["--mode", "train"],
            "params.yaml:1:1: trainer.fit: missing; the command 'fit' requires this section.\npara",
        ),
        (["--params", "none.yaml"], "none.yaml: cannot be read: no such file or directory."),
    ],
)
def test_a_wrong_option_is_2_and_named(run, capfd, options, message):
    assert run(*options) == 2
    assert capfd.readouterr().err.startswith(message)
    assert sorted(path.name for path in Path().iterdir()) == ["params.yaml"]


def test_all_wrong_changes_are_reported_together(run, capfd):
    assert run("--set", "a", "--set", "b") == 2
    assert [line[:7] for line in capfd.readouterr().err.splitlines()] == ["--set a", "--set b"]


@pytest.mark.parametrize("options", [[], ["--params"], ["--mode", "x"], ["--parms", "x"]])
def test_wrong_usage_is_2(options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("model: no loss."), "model: no loss.\n"),
        (BackendUnavailable("device: no GPU here."), "device: no GPU here.\n"),
    ],
)
def test_what_a_trainer_refuses_when_it_is_built_is_2(run, trainer, capfd, error, line):
    trainer.error_at_build = error
    assert run() == 2
    assert capfd.readouterr().err == line


def test_a_known_error_in_a_run_is_1_in_one_line_with_its_notes(run, trainer, capfd):
    trainer.error = CheckpointError("checkpoint_3 is damaged.")
    trainer.error.add_note("raised in Checkpoint.on_step_boundary")
    assert run() == 1
    assert capfd.readouterr().err == (
        "CheckpointError: checkpoint_3 is damaged. (raised in Checkpoint.on_step_boundary)\n"
    )


def test_a_setting_that_only_a_run_finds_wrong_is_2(run, trainer, capfd):
    trainer.error = ConfigError("val_dataloader yields no batch.")
    assert run() == 2
    assert capfd.readouterr().err == "val_dataloader yields no batch.\n"
    assert trainer.built[0].is_closed


def test_an_error_of_the_users_in_a_run_keeps_its_traceback(run, trainer):
    trainer.error = ZeroDivisionError("division by zero")
    with pytest.raises(ZeroDivisionError):
        run()
    assert trainer.built[0].is_closed


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("SIGINT", 130),
        ("SIGTERM", 143),
        ("SIGUSR1", 143),
        ("stop file", 143),
        ("max_time", 143),
    ],
)
def test_a_run_that_was_interrupted_says_so(run, trainer, reason, code):
    trainer.interrupted = reason
    assert run() == code


def test_ctrl_c_outside_of_training_is_130(run, trainer):
    trainer.error_at_build = KeyboardInterrupt()
    assert run() == 130


def test_trainers_of_a_list_run_one_after_another_until_one_ends_early(run, trainer):
    one = FILE.replace("trainer:\n", "").replace("\n", "\n    ")
    text = "trainer:\n" + f"  - trainer:\n    {one}model_dir: a\n" * 2
    text = text.replace("  model_dir: a\n", "\n").replace("model_dir: a", "")
    options = [
        "--set",
        "trainer[0].init.model_dir=a",
        "--set",
        "trainer[1].init.model_dir=b",
    ]
    assert run(*options, text=text) == 0
    assert [str(made.model_dir) for made in trainer.built] == ["a", "b"]
    trainer.interrupted = "SIGTERM"
    assert run("--set", "trainer[0].init.model_dir=c", text=text) == 143
    assert [str(made.model_dir) for made in trainer.built] == ["a", "b", "c"]


def test_a_signal_that_comes_too_late_for_a_trainer_ends_the_list_before_the_next(run, trainer):
    one = FILE.replace("trainer:\n", "").replace("\n", "\n    ")
    text = ("trainer:\n" + f"  - trainer:\n    {one}\n" * 2).replace("    \n", "\n")
    trainer.late_signal = "SIGINT"
    assert run(text=text) == 130
    assert len(trainer.built) == 1
    assert run("--model_dir", "alone") == 0  # what was asked for is complete


def test_classes_of_an_imported_module_are_named_without_their_path(run, tmp_path, monkeypatch):
    (tmp_path / "zoo_own_models.py").write_text(
        "class Mine:\n    def __init__(self, x: int): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = FILE.replace("{name: tiny_net, hidden_size: 4}", "{Mine: {x: 1}}")
    assert run(text=text) == 2
    assert run("--import", "zoo_own_models", text=text) == 0


def test_help_needs_neither_torch_nor_pydantic():
    program = (
        "import sys\n"
        "from modelzoo_trainer.cli.command import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    print(end.code, sorted({'torch', 'pydantic', 'yaml'} & "
        "set(sys.modules)))\n"
    )
    done = python("-c", program)
    assert done.stdout.endswith("0 []\n")
    assert "--set PATH=VALUE" in done.stdout


def test_a_file_that_is_no_yaml_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "params.yaml").write_text("a: [\n")
    program = (
        "import sys\n"
        "from modelzoo_trainer.cli.command import main\n"
        f"print(main(['--params', {str(tmp_path / 'params.yaml')!r}]), 'torch' in sys.modules)"
    )
    assert python("-c", program).stdout == "2 False\n"


@pytest.mark.parametrize("start", [["run.py"], ["-m", "modelzoo_trainer"]])
def test_both_ways_to_start_lead_to_the_same_program(start):
    done = python(*start, "--params", "no/such.yaml")
    assert (done.returncode, done.stderr) == (
        2,
        "no/such.yaml: cannot be read: no such file or directory.\n",
    )


REAL = """\
trainer:
  init:
    device: cpu
    model: {zoo_net.Net: {fails: %s}}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 1000000, eval_frequency: null}
    logging: {log_steps: 1000}
  fit:
    train_dataloader: {data_processor: zoo_net.batches}
"""
NET = """\
import itertools
from pathlib import Path
import torch

class Net(torch.nn.Module):
    def __init__(self, fails: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.fails = fails

    def forward(self, batch):
        if self.fails:
            raise ZeroDivisionError("in the model")
        return {"loss": (self.weight * batch).sum()}

class batches:
    def __iter__(self):
        yield torch.ones(1)
        Path("training").touch()  # the fit asks for its second batch
        yield from itertools.repeat(torch.ones(1))
"""


@pytest.fixture
def real_run(tmp_path):
    """Return a function that starts the program on a model that never ends, or fails."""
    (tmp_path / "zoo_net.py").write_text(NET)
    started = []

    def start(*, fails):
        (tmp_path / "params.yaml").write_text(REAL % str(fails).lower())
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), "--params", "params.yaml"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_a_real_run_with_its_code(real_run, tmp_path, number, code):
    process = real_run(fails=False)
    deadline = time.monotonic() + 180
    while not (tmp_path / "training").exists() and time.monotonic() < deadline:
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=180)
    assert process.returncode == code, err


@pytest.mark.slow
def test_an_error_in_a_real_run_is_1_with_the_users_traceback(real_run):
    process = real_run(fails=True)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "Traceback" in err
    assert "zoo_net.py" in err
    assert "ZeroDivisionError: in the model" in err


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--epochs", "--num_epochs"),
        ("--steps", "--max_steps"),
        ("--lr", "--set init.optimizer.ClassName.lr="),
        ("--batch-size", "--set fit.train_dataloader.batch_size=N"),
        ("--model-dir", "--model_dir"),
        ("--max-step", "--max_steps"),
        ("--resume", "the same command without it"),
    ],
)
def test_an_unknown_option_is_refused_with_what_it_is_called_here(run, capsys, option, meant):
    with pytest.raises(SystemExit) as ended:
        run(option, "3")
    assert ended.value.code == 2
    assert f"unrecognized arguments: {option} 3. Use {meant}" in capsys.readouterr().err
