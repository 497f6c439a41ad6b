"""A run that was stopped stays stopped, although torchrun starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from backends.coordination.restarts import StopRecord
from backends.coordination.world import join
from modelzoo_trainer import checkpointing
from tests.distributed.launching import (
    ROOT,
    Launched,
    Workers,
    command,
    set_limit,
    told,
    wait_until,
    weights,
)
from tests.distributed.ranks import environment, run_ranks

NUM_STEPS = 24
COUNT = "TORCHELASTIC_RESTART_COUNT"
LIMIT = "TORCHELASTIC_MAX_RESTARTS"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a torchrun that has started this process, and may do so twice again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {**environment(0, 1, store.port), LIMIT: "2"}.items():
        monkeypatch.setenv(name, value)
    return store


def found_at(count: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return what an attempt finds, after so many restarts."""
    monkeypatch.setenv(COUNT, str(count))
    return StopRecord(None).find()


def stop(reason: str) -> None:
    record = StopRecord(None)
    assert record.find() is None
    record.leave(reason)


def test_each_later_attempt_of_the_same_torchrun_finds_the_stop(agent, monkeypatch) -> None:
    stop("stop file")
    assert found_at(1, monkeypatch) == "stop file"
    assert found_at(2, monkeypatch) == "stop file"


def test_the_next_torchrun_finds_nothing(agent, monkeypatch) -> None:
    stop("SIGTERM")
    next_agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(next_agent.port))
    assert found_at(0, monkeypatch) is None
    assert found_at(1, monkeypatch) is None  # after a failure


def test_torchrun_that_restarts_on_purpose_as_a_node_joins_is_not_held_up(
    agent, monkeypatch
) -> None:
    stop("SIGTERM")
    assert found_at(0, monkeypatch) is None  # it does not count that as a restart
    assert found_at(1, monkeypatch) is None  # nor is a later failure taken for the stop


def test_without_torchruns_store_a_stop_warns_that_the_run_is_restarted(
    agent, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    stop("max_time")
    assert "restart the run" in caplog.text


def test_without_restarts_nothing_is_left(agent, monkeypatch, caplog) -> None:
    monkeypatch.setenv(LIMIT, "0")
    stop("max_time")
    assert not agent.check(["modelzoo_trainer/test/stopped"])
    assert not caplog.records


def _stop_together(rank: int) -> list[str | None]:
    """Stop in the first attempts of two nodes, of which one joined later, and in the next ones."""
    os.environ |= {LIMIT: "3", COUNT: str(rank)}
    processes = join()
    first = StopRecord(processes)
    found = [first.find()]
    first.leave("SIGUSR1")
    os.environ[COUNT] = str(2 * rank)
    found.append(StopRecord(processes).find())
    return found


def test_processes_of_nodes_that_count_differently_find_the_same() -> None:
    assert run_ranks(2, _stop_together) == [[None, "SIGUSR1"]] * 2


# ---- under torchrun


def _ask(launched: Launched, folder: Path) -> None:
    (folder / "stop").touch()


def _signal_a_rank(launched: Launched, folder: Path) -> None:
    os.kill(launched.workers()[1], signal.SIGTERM)


def _signal_torchrun(launched: Launched, folder: Path) -> None:
    launched.process.terminate()


def _wait(launched: Launched, folder: Path) -> None:
    """Its time is over before it may take another step."""


WAYS: dict[str, Callable[[Launched, Path], None]] = {
    "stop file": _ask,
    "SIGTERM to a rank": _signal_a_rank,
    "SIGTERM to torchrun": _signal_torchrun,
    "max_time": _wait,
}


# CI: a stop that a process asks for, and one that it is sent; the others end it in the same way.
@pytest.mark.soak_cases("SIGTERM to torchrun", "max_time")
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_torchrun_does_not_train_on_after_a_stop_and_the_next_one_resumes(tmp_path, way) -> None:
    folder, num_restarts = tmp_path / "run", 2 if way == "stop file" else 1
    max_time = "init.loop.max_time=4" if way == "max_time" else "init.loop.max_time=600"
    words = command(folder, "init.callbacks[Tell].pause=1.0", max_time)
    options = [f"--max-restarts={num_restarts}"]
    with Launched(tmp_path / "l", words, options=options) as launched:
        wait_until(lambda: len(told(folder)) >= 3, what=launched.said)
        WAYS[way](launched, folder)
        assert launched.code() == 1, launched.said
        assert launched.left(10.0) == []
    begun, *_, ended = told(folder)
    assert (begun[0], ended[0], " ".join(ended[2:])) == ("begin", "end", way.split(" to ")[0])
    assert sum(line[0] == "begin" for line in told(folder)) == 1
    assert checkpointing.list_checkpoints(folder)[-1].step == int(ended[1])
    num_empty = launched.said.count("torchrun restarted a run")
    assert num_empty == (0 if way == "SIGTERM to torchrun" else num_restarts)
    words = command(folder)
    if way == "stop file":
        with Launched(tmp_path / "next", words, options=options) as launched:
            assert launched.code() == 0, launched.said
    else:  # a store of their own, as of another torchrun
        with Workers(tmp_path / "next", words) as workers:
            assert workers.codes() == [0, 0], workers.said
    begins = [line[1] for line in told(folder) if line[0] == "begin"]
    assert begins == ["0", ended[1]]
    assert told(folder)[-1][:2] == ["end", str(NUM_STEPS)]


@pytest.mark.slow
def test_a_single_process_of_torchrun_stays_stopped_likewise(tmp_path) -> None:
    folder = tmp_path / "run"
    words = command(folder, "init.callbacks[Tell].pause=0.05", "init.loop.max_steps=2000")
    with Launched(tmp_path / "l", words, num=1, options=["--max-restarts=1"]) as launched:
        wait_until(lambda: len(told(folder)) >= 5, what=launched.said)
        (folder / "stop").touch()
        assert launched.code() == 1, launched.said
    assert [line[0] for line in told(folder)].count("begin") == 1
    assert launched.said.count("torchrun restarted a run") == 1


@pytest.mark.slow
def test_a_stop_after_a_failure_and_a_restart_is_one_as_well(tmp_path) -> None:
    folder, limit = tmp_path / "run", tmp_path / "limit"
    words = command(folder, f"init.callbacks[Tell].limit={limit}", "init.callbacks[Tell].pause=0.3")
    set_limit(limit, 8)
    with Launched(tmp_path / "l", words, options=["--max-restarts=3"]) as launched:
        wait_until(lambda: len(told(folder)) >= 8, what=launched.said)
        os.kill(launched.workers()[0], signal.SIGKILL)
        set_limit(limit, 12)
        wait_until(lambda: [x[0] for x in told(folder)].count("begin") == 2, what=launched.said)
        (folder / "stop").touch()
        limit.unlink()
        assert launched.code() == 1, launched.said
    assert [line[0] for line in told(folder)].count("begin") == 2
    assert told(folder)[-1][0] == "end"
    assert launched.said.count("torchrun restarted a run") == 2


# ---- from a snapshot in memory


def _killed_at_9(place: Path, memory: Path, rank: int, *changes: str) -> list[str]:
    """Return the words of a run of which a process is killed once, when 9 steps are done."""
    disturb = {"how": "'SIGKILL'", "rank": rank, "step": 9, "mark": place / "mark"}
    return command(
        place / "run",
        f"init.checkpoint.memory={{steps: 1, path: {memory}}}",
        *(f"init.callbacks[Disturb].{name}={value}" for name, value in disturb.items()),
        *changes,
    )


def _assert_went_on_from_9(folder: Path, whole: Path, memory: Path) -> None:
    begins = [line[1] for line in told(folder) if line[0] == "begin"]
    assert begins == ["0", "9"]  # the newest checkpoint on disk has 6
    assert weights(folder)[NUM_STEPS] == weights(whole)[NUM_STEPS]
    assert list(memory.glob("*/*")) == []


@pytest.mark.slow
def test_torchrun_starts_again_from_a_snapshot_in_memory(tmp_path, memory) -> None:
    whole = tmp_path / "whole"
    with Workers(tmp_path / "w", command(whole)) as workers:
        assert workers.codes() == [0, 0], workers.said
    words = _killed_at_9(tmp_path, memory, rank=1)
    with Launched(tmp_path / "l", words, options=["--max-restarts=1"]) as launched:
        assert launched.code() == 0, launched.said
    _assert_went_on_from_9(tmp_path / "run", whole, memory)


@pytest.mark.slow
def test_the_supervisor_starts_again_from_a_snapshot_in_memory(tmp_path, memory) -> None:
    def run(words: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    run(command(tmp_path / "whole"))
    run(_killed_at_9(tmp_path, memory, 0, "init.autorestart={max_num_restarts: 1}"))
    _assert_went_on_from_9(tmp_path / "run", tmp_path / "whole", memory)
