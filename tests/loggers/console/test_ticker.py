"""The thread that draws: it ends in time, and harms neither the run nor its workers."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback
from modelzoo_trainer.core.parts.results_log import number
from modelzoo_trainer.loggers import ProgressLogger
from modelzoo_trainer.loggers.console import ticker as ticker_module
from modelzoo_trainer.loggers.console.ticker import Ticker, drawing
from tests.doubles import tiny_batches


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "progress"]


def test_it_ticks_until_it_is_stopped() -> None:
    seen = threading.Event()
    ticker = Ticker(seen.set, 0.01)
    ticker.start()
    assert seen.wait(10)
    ticker.stop()
    ticker.stop()
    assert threads() == []
    seen.clear()
    assert not seen.wait(0.1)


def test_what_goes_wrong_in_a_tick_stays_there() -> None:
    calls = []

    def tick() -> None:
        calls.append(1)
        raise OSError("the console is gone")

    ticker = Ticker(tick, 0.01)
    ticker.start()
    end = time.monotonic() + 10
    while len(calls) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    ticker.stop()
    assert len(calls) >= 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_finds_the_locks_free(monkeypatch) -> None:
    monkeypatch.setattr(ticker_module, "_PATIENCE_S", 60.0)  # of a fork, on a machine that stalls
    """While a tick holds a handler's lock nearly all the time."""
    handler = logging.NullHandler()
    lock = handler.lock = threading.RLock()

    def tick() -> None:
        with lock:
            time.sleep(0.02)

    ticker = Ticker(tick, 0.0)
    ticker.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if lock.acquire(timeout=5) and drawing_is_free() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        ticker.stop()


def drawing_is_free() -> bool:
    with drawing():
        return True


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    return DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")


@pytest.mark.slow
def test_workers_are_forked_each_epoch_beside_it(trainer_of) -> None:
    trainer = trainer_of(num_epochs=3, loggers=[ProgressLogger(interval_s=0.0)], progress="bar")
    assert trainer.fit(loader(), loader()).steps == 18
    assert threads() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["bar", "lines"])
def test_it_ends_with_a_run_that_fails(trainer_of, capsys, kind, error) -> None:
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            assert threads() == ["progress"]
            raise error("broken")

    before = list(logging.getLogger("modelzoo_trainer").handlers)
    with pytest.raises(error):
        trainer_of(Fail(), progress=kind).fit(tiny_batches())
    assert threads() == []
    assert logging.getLogger("modelzoo_trainer").handlers == before


def test_none_needs_no_thread(trainer_of) -> None:
    class Look(Callback):
        def on_step_boundary(self, trainer):
            assert threads() == []

    trainer_of(Look(), progress="none", loggers=[ProgressLogger()]).fit(tiny_batches())


PROGRAM = """
import sys, time, torch
sys.path.insert(0, ".")
from modelzoo_trainer import Callback, Trainer, TrainingLoop

class Model(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch[0]).pow(2).mean()

class Slow(Callback):
    def on_step_boundary(self, trainer):
        time.sleep({pause})

data = [(torch.randn(4, 3),) for _ in range(10)]
{setup}
trainer = Trainer(
    model=Model(3, 1), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    loop=TrainingLoop(num_epochs=2), model_dir=sys.argv[1], callbacks=[Slow()], {arguments}
)
trainer.fit(data, data[:2])
"""


def run(tmp_path, *, pause=0.0, setup="", arguments="") -> tuple[str, str]:
    text = PROGRAM.format(pause=pause, setup=setup, arguments=arguments)
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(text), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_program_in_a_pipe_has_a_screen_of_plain_lines(tmp_path) -> None:
    printed, said = run(tmp_path)
    lines = said.splitlines()
    assert printed == ""
    assert len(lines) <= 25
    assert [line for line in lines if len(line) > 100 and str(tmp_path) not in line] == []
    assert "\r" not in said
    assert lines[0].startswith("Training Model (4 parameters) on cpu")
    assert [line.split()[2] for line in lines if "train step" in line] == ["1/20"]
    assert sum(line.startswith("validate_0: loss") for line in lines) == 1
    assert sum(line.startswith("Finished at step 20") for line in lines) == 1


@pytest.mark.slow
def test_a_run_that_logs_nothing_shows_life_by_itself(tmp_path) -> None:
    arguments = "logging=__import__('modelzoo_trainer').Logging(log_steps=0)"
    _, said = run(tmp_path, pause=0.15, arguments=arguments)
    first = next(line for line in said.splitlines() if line.startswith("train step"))
    assert int(first.split()[2].partition("/")[0]) < 12
    assert "loss" not in first


@pytest.mark.slow
@pytest.mark.parametrize("loggers", ["()", "ProgressLogger()"])  # the second as a file has it
def test_none_is_silent(tmp_path, loggers) -> None:
    setup = "from modelzoo_trainer.loggers import ProgressLogger"
    arguments = f"progress='none', loggers={loggers}"
    assert run(tmp_path, setup=setup, arguments=arguments) == ("", "")


@pytest.mark.slow
def test_none_writes_the_results_of_validations_to_files(tmp_path) -> None:
    setup = "from modelzoo_trainer.loggers import JsonlLogger"
    arguments = "progress='none', loggers=JsonlLogger()"
    assert run(tmp_path, setup=setup, arguments=arguments) == ("", "")
    [found] = {path.resolve() for path in tmp_path.rglob("run.log")}
    [metrics] = tmp_path.rglob("metrics.jsonl")
    [line] = [line for line in found.read_text().splitlines() if "validate_0: loss" in line]
    records = [json.loads(text) for text in metrics.read_text().splitlines()]
    [record] = [record for record in records if "validate_0/loss" in record]
    step, loss = re.search(r"loss (\S+) at step (\d+)", line).group(2, 1)
    assert int(step) == record["step"]
    assert loss == number(record["validate_0/loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        "import logging; logging.getLogger('modelzoo_trainer').setLevel(logging.WARNING)",
        "import logging; logging.basicConfig(filename=sys.argv[1] + '.log', level=logging.INFO)",
    ],
)
def test_the_logging_of_the_program_is_respected(tmp_path, setup) -> None:
    assert run(tmp_path, setup=setup) == ("", "")
    if "basicConfig" in setup:
        assert "Finished at step 20" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_a_bar_can_be_had_anywhere(tmp_path) -> None:
    _, said = run(tmp_path, pause=0.05, arguments="progress='bar'")
    assert "train step" not in said
    assert "20/20" in said
    assert said.rstrip("\n").rpartition("\r")[2].count("Finished") == 1
