"""A disk that is full or read-only while a run saves: training ends, the last good one loads."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import Callback, Trainer, TrainingLoop, checkpointing, loggers
from tests.reliability.program import GO
from tests.reliability.runs import Run
from tests.reliability.states import visible

pytestmark = pytest.mark.slow

STEPS = 48
FULL = "No space left on device"
PAD = 40_000  # numbers of 4 bytes


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a small file system of its own on a folder."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    folder.mkdir()
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def intact(run: Run) -> list[Path]:
    """Return the checkpoints of a run that trained to its end, all of which must be intact."""
    assert run.num_batches == STEPS
    found = visible(run.folder)
    assert found
    assert all(checkpointing.verify(path) == [] for path in found)
    assert run.leftovers() == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_while_the_disk_is_full(runs, count, asynchronous) -> None:
    run = runs.new(asynchronous=asynchronous, full_from=10, full_to=30)
    assert run.once().code == 0
    steps = [int(path.name.split("_")[1]) for path in intact(run)]
    assert FULL in runs.nursery.said()
    assert steps[0] == 1
    assert not set(range(11, 29 if asynchronous else 30)) & set(steps)  # one may be under way
    assert set(range(32, 49)) <= set(steps)
    assert run.result == runs.unbroken(asynchronous=asynchronous).result
    count(trials=1)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_a_disk_that_fills_up_trains_on(runs, count, tmp_path, asynchronous) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "none") as folder:
        run = runs.new(asynchronous=asynchronous, pad=PAD, folder=str(folder / "run"))
        run.folder = folder / "run"
        assert run.once().code == 1  # the one at the end could not be written either
        assert intact(run)
        assert FULL in runs.nursery.said()
    count(trials=1)


def test_a_run_on_a_disk_that_becomes_read_only_trains_on(runs, count, tmp_path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=40m", "none") as folder:
        run = runs.new(root=str(folder), hold_at=STEPS // 2)
        child = run.start()
        while len(visible(folder)) < STEPS // 2:
            assert not child.has_ended(0.01)
        while subprocess.run(["mount", "-o", "remount,ro", folder], check=False).returncode:
            assert not child.has_ended(0.01)  # busy: a checkpoint is just being written
        (run.place / GO).touch()
        run.end(child.wait())
        assert run.num_batches == STEPS
        newest = visible(folder)[-1]
        assert checkpointing.verify(newest) == []
        assert "Read-only file system" in runs.nursery.said()
    count(trials=1)


def test_a_run_is_refused_before_its_start_if_there_is_no_space(runs, count, tmp_path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "none") as folder:
        run = runs.new(pad=1_000_000, folder=str(folder / "run"))
        assert run.once().code == 1
        assert run.num_batches == 0
        assert "of free space, and one checkpoint" in runs.nursery.said()
    count(trials=1)


class Net(torch.nn.Linear):
    def forward(self, batch):
        return {"loss": super().forward(batch).square().mean()}


class Texts(Callback):
    """Logs 10 kB a step, in the file at once."""

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(text="x" * 10_000)

    def on_step_boundary(self, trainer):
        trainer.loggers[0].flush()


def writer(name: str, folder: Path) -> loggers.Logger:
    if name == "TensorBoardLogger":
        pytest.importorskip("tensorboard")
        return loggers.TensorBoardLogger(summary_dir=folder)
    return getattr(loggers, name)(folder / "metrics")


# The thread that writes events prints what ends it, besides what the logger says.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["CSVLogger", "JsonlLogger", "TensorBoardLogger"])
def test_a_run_whose_metrics_have_no_space_trains_on(count, tmp_path, caplog, name) -> None:
    before = threading.enumerate()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=64k", "none") as folder:
        with Trainer(
            device="cpu",
            model_dir=tmp_path / "run",
            model=lambda: Net(2, 1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            loop=TrainingLoop(max_steps=30),
            callbacks=[Texts()],
            loggers=[writer(name, folder)],
        ) as trainer:
            trainer.fit([torch.ones(2, 2)] * 30)
        assert trainer.global_step == 30
    for thread in set(threading.enumerate()) - set(before):
        thread.join(10)  # what ends it is printed within this test
    assert caplog.text.count("so metrics are lost: [Errno 28]") == 1
    count(trials=1)
