"""Supervised runs from the command line: real processes that train a small model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from modelzoo_trainer.checkpointing import load
from modelzoo_trainer.cli.command import main
from tests.handled_signals import handles

ROOT = Path(__file__).resolve().parents[2]
ZOO = '''\
import os, signal, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from modelzoo_trainer import Callback


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, batch):
        hidden = self.dropout(torch.relu(self.layer(batch[0])))
        return {"loss": self.head(hidden).pow(2).mean()}


class Points:
    def create_dataloader(self):
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(points), batch_size=4, shuffle=True)


class Fault(Callback):
    """Does harm at the end of a step, once a folder."""

    def __init__(self, kind: str, at: int, times: int = 1):
        self.kind, self.at, self.times = kind, at, times

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.trainer = trainer
        with Path("starts").open("a") as file:
            restart = trainer.autorestart
            file.write(f"{trainer.global_step} {restart.is_restart} {restart.last_checkpoint}\\n")

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        done = Path("faults")
        num = len(done.read_text()) if done.exists() else 0
        if trainer.global_step == self.at and num < self.times:
            done.write_text("x" * (num + 1))
            getattr(self, self.kind)()

    def crash(self):
        raise RuntimeError("the first time")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(300)

    def terminate(self):
        os.kill(os.getppid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while not self.trainer.early_exit.is_asked:
            assert time.monotonic() < end, "the signal is not passed on"
            time.sleep(0.01)
'''
FILE = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: out
    model: {zoo_restart.Net: {}}
    optimizer: {AdamW: {lr: 0.01}}
    loop: {max_steps: 8, eval_frequency: null}
    checkpoint: {steps: 2}
    logging: {log_steps: 1}
    callbacks: CALLBACKS
    autorestart: {max_num_restarts: 2LIMITS}
  fit:
    train_dataloader: {data_processor: zoo_restart.Points}
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts the command, on a file with a fault."""
    (tmp_path / "zoo_restart.py").write_text(ZOO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def of(fault, *options, limits="", text=FILE, stderr=subprocess.PIPE):
        callbacks = "[]" if fault is None else f"[{{zoo_restart.Fault: {fault}}}]"
        text = text.replace("CALLBACKS", callbacks).replace("LIMITS", limits)
        Path("params.yaml").write_text(text)
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), "-p", "params.yaml", *options],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    return of


@pytest.fixture
def run(start):
    def of(*arguments, **more):
        process = start(*arguments, **more)
        _, process.err = process.communicate(timeout=300)
        return process

    return of


def supervised():
    """Return the folder of the supervisor, and its ledger."""
    [folder] = Path("out/restarts").iterdir()
    return folder, json.loads((folder / "ledger.json").read_text())


def starts():
    return Path("starts").read_text().splitlines()


def metrics(folder):
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "train_loss", "lr")
    return [{name: value for name, value in one.items() if name in kept} for one in lines]


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_run_that_was_killed_is_started_again_from_its_newest_checkpoint(run):
    done = run("{kind: kill, at: 5}")
    assert done.returncode == 0, done.err
    folder, ledger = supervised()
    assert [one["outcome"] for one in ledger["attempts"]] == ["killed", "done"]
    assert [one["start_step"] for one in ledger["attempts"]] == [0, 4]
    assert starts() == ["0 False None", f"4 True {Path('out/checkpoint_4').absolute()}"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_s"])
    assert ledger["seconds"]["lost"] > 0
    assert ledger["command"][1:] == ["-p", "params.yaml"]
    assert done.err.splitlines()[-1].endswith(f"See {folder.absolute() / 'ledger.json'}.")
    assert "--supervised" not in Path("out/logs/latest/params.yaml").read_text()


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_if_nothing_had_happened(run):
    assert run("{kind: kill, at: 5}").returncode == 0
    alone = ["--set", "init.autorestart=null", "--set", "init.callbacks=[]", "-o", "alone"]
    assert main(["-p", "params.yaml", *alone]) == 0
    assert same(load(Path("out/checkpoint_8"))["model"], load(Path("alone/checkpoint_8"))["model"])
    assert metrics("out") == metrics("alone")


@pytest.mark.slow
def test_a_crash_is_told_and_the_same_one_again_ends_the_run(run):
    done = run("{kind: crash, at: 3, times: 9}")
    assert done.returncode == 1
    _, ledger = supervised()
    cause = "RuntimeError: the first time"
    assert [one["cause"] for one in ledger["attempts"]] == [cause, cause]
    assert done.err.count("Traceback") == 2
    assert "Not restarting: the same error" in done.err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_standard_error_that_cannot_be_written_ends_no_run(start):
    with open("/dev/full", "w") as full:
        process = start("{kind: kill, at: 3}", stderr=full)
        assert process.wait(timeout=300) == 0
    process.stdout.close()
    _, ledger = supervised()
    assert [one["outcome"] for one in ledger["attempts"]] == ["killed", "done"]


@pytest.mark.slow
def test_a_hang_is_found_and_its_stacks_are_in_the_folder(run):
    done = run("{kind: hang, at: 5}", limits=", hang_timeout: 0.5")
    assert done.returncode == 0, done.err
    folder, ledger = supervised()
    # A disk that is late may be taken for a hang as well, with so small a limit.
    *failed, last = [one["outcome"] for one in ledger["attempts"]]
    assert (set(failed), last) == ({"hung"}, "done")
    assert any("in hang" in path.read_text() for path in folder.glob("stacks_*.txt"))


@pytest.mark.slow
def test_what_a_run_has_made_goes_before_what_it_was_told_to_begin_with(run):
    assert run(None, "-o", "before", "--set", "init.autorestart=null").returncode == 0
    options = ["--checkpoint_path", "before/checkpoint_2"]
    done = run("{kind: kill, at: 5}", *options)
    assert done.returncode == 0, done.err
    own = Path("out/checkpoint_4").absolute()
    assert starts() == ["2 False None", f"4 True {own}"]


@pytest.mark.slow
def test_a_trainer_that_is_done_is_not_run_again(run):
    one = FILE.replace("trainer:\n", "  trainer:\n", 1).replace("\n  ", "\n    ")
    first = "- " + one.strip().replace("CALLBACKS", "[]").replace("LIMITS", "")
    second = first.replace("model_dir: out", "model_dir: two").replace(
        "callbacks: []", "callbacks: [{zoo_restart.Fault: {kind: kill, at: 5}}]"
    )
    done = run(None, text=f"trainer:\n{first}\n{second}\n")
    assert done.returncode == 0, done.err
    _, ledger = supervised()
    assert [one["outcome"] for one in ledger["attempts"]] == ["killed", "done"]
    assert [one["trainer"] for one in ledger["attempts"]] == [1, 1]
    assert len(list(Path("out/logs").glob("2*"))) == 1
    assert len(list(Path("two/logs").glob("2*"))) == 2


@pytest.mark.slow
def test_a_wrong_configuration_is_told_once_and_leaves_nothing(run, tmp_path):
    done = run(None, "--set", "init.loop.max_stpes=1")
    assert done.returncode == 2
    assert len(done.err.splitlines()) == 1
    assert "no such argument of TrainingLoop. Did you mean 'max_steps'?" in done.err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "params.yaml",
        "zoo_restart.py",
    }


@pytest.mark.slow
def test_a_signal_to_the_supervisor_ends_the_run_in_order(run):
    done = run("{kind: terminate, at: 3}")
    assert done.returncode == 143, done.err
    _, ledger = supervised()
    assert [one["cause"] for one in ledger["attempts"]] == ["stopped by SIGTERM"]
    assert ledger["seconds"]["lost"] == 0
    step = ledger["attempts"][0]["step"]
    assert Path(f"out/checkpoint_{step}").is_dir()
    assert "autorestart: stopped on request after 1 attempt" in done.err


def test_trainers_that_do_not_agree_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = "- trainer: {init: {autorestart: {max_num_restarts: 2}}}\n"
    Path("params.yaml").write_text(f"trainer:\n{one}- trainer: {{init: {{}}}}\n")
    assert main(["-p", "params.yaml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("params.yaml: ")
    facts = ("1 of the 2 trainers", "trainer[1]", "init.autorestart.max_num_restarts")
    assert [fact for fact in facts if fact not in line] == []


@pytest.mark.parametrize("text", ["x", "{}", '{"folder": "f", "attempt": 1, "supervisor": 1}'])
def test_the_hidden_option_is_refused_from_anybody_else(capsys, text):
    assert main(["-p", "params.yaml", "--supervised", text]) == 2
    assert "--supervised" in capsys.readouterr().err


def test_the_help_tells_the_codes_and_not_the_hidden_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "--supervised" not in told
    for code in ("  0    success", "  1    the run failed", "  2    ", "  130  ", "  143  "):
        assert code in told


@pytest.fixture
def starting(start):
    """Return a function that starts a long run, and returns it when it takes signals."""
    if not Path("/proc/self/status").exists():
        pytest.skip("nobody tells here whether a process takes signals")

    def of():
        process = start(None, "--set", "init.autorestart=null", "--max_steps", "10000000")
        deadline = time.monotonic() + 180
        while not handles(process.pid, signal.SIGUSR1) and time.monotonic() < deadline:
            time.sleep(0.005)
        return process

    return of


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143)])
@pytest.mark.slow_cases(every=4)
def test_a_signal_while_it_starts_ends_it_without_a_word(starting, name, code):
    Path("zoo_restart.py").write_text("import time\ntime.sleep(300)\n")  # it does not train
    process = starting()
    time.sleep(0.3)  # in the midst of its imports
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, "")


@pytest.mark.slow
@pytest.mark.parametrize("times", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_a_signal_at_any_instant_of_the_start_ends_it(starting, times):
    instants = random.Random(1)
    codes = set()
    for _ in range(times):
        process = starting()
        time.sleep(instants.uniform(0, 2.5))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        codes.add((process.returncode, "Traceback" in err))
    assert codes == {(143, False)}


@pytest.mark.slow
def test_an_error_of_the_operating_system_is_1_in_one_line(start):
    text = FILE.replace("{data_processor: zoo_restart.Points}", "{data_processor: zoo_lost.Lost}")
    Path("zoo_lost.py").write_text(
        "class Lost:\n    def create_dataloader(self):\n        return open('no_such_file')\n"
    )
    process = start(None, "--set", "init.autorestart=null", text=text)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.splitlines() == [
        "FileNotFoundError: [Errno 2] No such file or directory: 'no_such_file' "
        "(raised by trainer.fit.train_dataloader (params.yaml:14:5), in "
        "zoo_lost.Lost.create_dataloader: correct this class, or its arguments in the file) "
        "(raised in DataLoaderCallback.on_enter_fit at global_step 0)"
    ]


@pytest.mark.slow
def test_a_job_that_slurm_queues_again_resumes_whatever_ckpt_path_it_started_from(
    start, monkeypatch
):
    path = "out/checkpoint_2"
    text = FILE.replace("    autorestart: {max_num_restarts: 2LIMITS}\n", "")
    start(None, text=text).communicate(timeout=120)
    text = text.replace("max_steps: 8", "max_steps: 12") + f"    ckpt_path: {path}\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    process = start("{kind: crash, at: 100}", text=text)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert Path("starts").read_text() == "8 True None\n"
