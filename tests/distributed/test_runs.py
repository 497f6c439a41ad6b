"""Whole runs from the command line, in several processes: under torchrun, or a like launcher."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from backends.coordination import rendezvous
from backends.coordination.world import World
from modelzoo_trainer import checkpointing
from modelzoo_trainer.core.run_lock import FolderLock
from tests.distributed.launching import (
    Launched,
    Workers,
    command,
    logged,
    set_limit,
    told,
    unfinished,
    wait_until,
    weights,
)
from tests.distributed.ranks import free_port

NUM_STEPS = 24
GONE_S = 30.0  # patience; how long it takes is measured in the long form
WRONG_USE = 2
SHARDED = "init.backend.parallel={shard: -1}"


# ---- what several processes write


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in logged(folder) if "loss" in line]


def quickstart(folder: Path, *changes: str) -> list[str]:
    given = [
        f"init.model_dir={folder}",
        "init.loop.max_steps=4",
        "init.loop.eval_steps=1",
        "init.loop.eval_frequency=2",
        "init.checkpoint.steps=2",
        "init.logging.log_steps=1",
        "init.callbacks=[]",
        *changes,
    ]
    words = [word for change in given for word in ("--set", change)]
    return ["--params", "configs/quickstart.yaml", "--device", "cpu", *words]


@pytest.mark.slow
def test_the_quickstart_under_torchrun_is_that_of_one_process(tmp_path) -> None:
    with Workers(tmp_path / "one", quickstart(tmp_path / "alone", _batch(64)), num=1) as alone:
        with Launched(tmp_path / "two", quickstart(tmp_path / "run")) as launched:
            assert launched.code() == 0, launched.said
            assert launched.left(GONE_S) == []
        assert alone.codes() == [0], alone.said
    lines = [line for line in launched.said.splitlines() if line]
    assert len(lines) == len(set(lines))
    assert not [line for line in lines if line.startswith(("WARNING", "ERROR", "process"))]
    assert sum(line.startswith("Training ") for line in lines) == 1
    assert sum(line.startswith("Finished at step 4") for line in lines) == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert len(losses(tmp_path / "run")) == 4
    assert len(list((tmp_path / "run" / "logs").glob("2*"))) == 1
    assert [one.step for one in checkpointing.list_checkpoints(tmp_path / "run")] == [2, 4]
    assert unfinished(tmp_path / "run") == []


def _batch(num: int) -> str:
    return f"fit.train_dataloader.batch_size={num}"


# ---- what is wrong


def complaints(workers: Workers) -> list[str]:
    """Return the lines that were said: they have no progress, which is only information."""
    return workers.said.splitlines()


def nothing_was_written(folder: Path) -> bool:
    """Return whether there is no checkpoint, and nothing of one."""
    return unfinished(folder) == [] and not list(folder.glob("checkpoint*"))


WRONG = {
    "mesh": (
        [["init.backend.parallel={shard: 3}"]] * 2,
        r"process \d: backend.parallel is \{replicate: -1, shard: 3, context: 1, tensor: 1\}, "
        r"which requires a multiple of 3 processes, but there are 2\.",
    ),
    "different": (
        [[], ["init.seed=8"]],
        r"process \d: .*process 1 has 'seed: 8' where process 0 has 'seed: 7'",
    ),
    "misspelt": ([[], ["init.sed=8"]], r"process 1: .*init\.sed: no such key.*'seed'\?"),
    "batch": (
        [["fit.train_dataloader.batch_size=null", "fit.train_dataloader.global_batch_size=9"]] * 2,
        r"process \d: train_dataloader: .* 9 .* 2 processes",
    ),
    "checkpoint": (
        [["fit.ckpt_path=nowhere/checkpoint_1"]] * 2,
        r"process \d: .*ckpt_path: checkpoint 'nowhere/checkpoint_1' does not exist\.",
    ),
}


@pytest.mark.slow_cases("misspelt", every=4)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_once_and_all_end(tmp_path, name) -> None:
    changes, message = WRONG[name]
    words = [command(tmp_path / "run", *own) for own in changes]
    with Workers(tmp_path / "output", words) as workers:
        workers.wait_for_one()
        assert workers.codes(GONE_S) == [WRONG_USE] * 2, workers.said
        [line] = complaints(workers)
    assert re.match(message, line), line
    assert nothing_was_written(tmp_path / "run")


ODD = {
    "parallel={context: 2}": "a row has 63 positions, which must be a multiple of 4",
    "parallel={tensor: 2}|sequence_parallel=true": "but a batch has 63 positions",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ODD)
def test_rows_that_cannot_be_split_are_wrong_use(tmp_path, setting) -> None:
    changes = [f"init.backend.{one}" for one in setting.split("|")]
    words = quickstart(tmp_path / "run", "fit.train_dataloader.max_sequence_length=63", *changes)
    with Workers(tmp_path / "output", words) as workers:
        workers.wait_for_one()
        assert workers.codes(GONE_S) == [WRONG_USE] * 2, workers.said
        [line] = [one for one in complaints(workers) if one.startswith("process")]
    assert ODD[setting] in line
    assert "Traceback" not in workers.said
    assert nothing_was_written(tmp_path / "run")


@pytest.mark.slow
def test_data_that_one_process_does_not_have_are_missing_for_all(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    data = "fit.train_dataloader={data_processor: TextFileProcessor, data_dir: text.txt, "
    data += "batch_size: 4, max_sequence_length: 8, cache_dir: cache}"
    words = command(tmp_path / "run", data)

    def seen_by(rank: int) -> Path:
        return tmp_path if rank == 0 else tmp_path / "elsewhere"

    (tmp_path / "elsewhere").mkdir()
    with Workers(tmp_path / "output", words, place=seen_by) as workers:
        workers.wait_for_one()
        assert workers.codes(GONE_S) == [WRONG_USE] * 2, workers.said
        [line] = complaints(workers)
    assert line.startswith("process 1: ")
    assert "data_dir 'text.txt' does not exist" in line
    assert nothing_was_written(tmp_path / "run")


def test_a_folder_in_use_is_refused_once(tmp_path) -> None:
    lock = FolderLock("model_dir")
    lock.take(tmp_path / "run")
    try:
        with Workers(tmp_path / "output", command(tmp_path / "run")) as workers:
            assert workers.codes() == [WRONG_USE] * 2
            [line] = complaints(workers)
    finally:
        lock.release()
    assert line.startswith(f"process 0: model_dir '{tmp_path / 'run'}' is in use by process ")
    assert nothing_was_written(tmp_path / "run")


def _without_agent(port: int, **environ: str | None) -> dict[str, str | None]:
    given = {"TORCHELASTIC_USE_AGENT_STORE": None, "TORCHELASTIC_RUN_ID": None}
    return {**given, "MASTER_PORT": str(port), **environ}


def _shake_hands_briefly() -> None:
    rendezvous._SHAKE_HANDS_S = 2.0  # nobody answers, however long it waits


@pytest.mark.slow
def test_a_port_in_use_is_told(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = command(tmp_path / "run")
        with Workers(
            tmp_path / "w",
            words,
            environ=lambda rank: _without_agent(port),
            prepare=_shake_hands_briefly,
        ) as workers:
            workers.wait_for_one()
            assert workers.codes(GONE_S) == [WRONG_USE] * 2
            said = [workers.said_by(rank) for rank in range(2)]
    assert said[0].startswith(f"Port {port} (MASTER_PORT) is in use on this host")
    assert said[1].startswith(f"Port {port} of 127.0.0.1 is in use by another program")
    assert nothing_was_written(tmp_path / "run")


def _end_the_first_before_its_groups() -> None:
    new_group = World.new_group

    def wait_and_end(self: World) -> None:
        self._store.wait(["is connected"])
        os._exit(7)

    def tell(self: World) -> Any:
        self._store.set("is connected", "yes")
        return new_group(self)

    is_first = os.environ["RANK"] == "0"
    World.new_group = wait_and_end if is_first else tell  # type: ignore[assignment]


@pytest.mark.slow
def test_a_process_that_ends_while_all_meet_is_told_in_a_line(tmp_path) -> None:
    words = command(tmp_path / "run")
    with Workers(tmp_path / "w", words, prepare=_end_the_first_before_its_groups) as workers:
        assert workers.codes(GONE_S) == [7, WRONG_USE]
        said = workers.said_by(1)
    assert said.startswith("Process 1 of 2 cannot connect to the others: "), said
    assert said.count("\n") == 1
    assert nothing_was_written(tmp_path / "run")


def _fail_to_connect() -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "Gloo connectFullMesh failed with [/__w/pytorch/gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [127.0.0.1]:35789. This is typically caused by a remote "
            "worker crashing. Check the logs of the remote worker before reporting an error."
        )

    dist.init_process_group = fail


@pytest.mark.slow
def test_a_failed_connection_is_told_without_torchs_source_and_advice(tmp_path) -> None:
    with Workers(tmp_path / "w", command(tmp_path / "run"), prepare=_fail_to_connect) as workers:
        assert workers.codes(GONE_S) == [WRONG_USE] * 2
        said = workers.said_by(1)
    assert said == (
        "Process 1 of 2 cannot connect to the others: Gloo connectFullMesh failed with Connection "
        "closed by peer [127.0.0.1]:35789. Check whether one of them has ended, MASTER_ADDR, "
        "MASTER_PORT and the firewall.\n"
    )


def test_an_environment_that_is_not_complete_is_refused(tmp_path) -> None:
    words = command(tmp_path / "run")
    with Workers(tmp_path / "w", words, environ=lambda rank: {"WORLD_SIZE": None}) as workers:
        assert workers.codes() == [WRONG_USE] * 2
    assert workers.said_by(0).startswith("RANK is set in the environment, but not WORLD_SIZE. ")
    assert nothing_was_written(tmp_path / "run")


# ---- other launchers, other layouts


@pytest.mark.slow
def test_a_launcher_without_a_store_will_do_and_restarts_are_its_part(tmp_path) -> None:
    port = free_port()
    words = command(tmp_path / "run", "init.autorestart={max_num_restarts: 2}")
    with Workers(tmp_path / "w", words, environ=lambda rank: _without_agent(port)) as workers:
        assert workers.codes() == [0, 0], workers.said
    [note] = complaints(workers)
    assert note.startswith("note: init.autorestart.max_num_restarts has no effect")
    assert checkpointing.list_checkpoints(tmp_path / "run")[-1].step == NUM_STEPS


@pytest.mark.slow
def test_a_checkpoint_of_another_layout_loads(tmp_path) -> None:
    cut = command(tmp_path / "run", "init.loop.max_steps=12")
    with Workers(tmp_path / "w", cut) as workers:
        assert workers.codes() == [0, 0], workers.said
    with Workers(tmp_path / "w", command(tmp_path / "run", SHARDED)) as workers:
        assert workers.codes() == [0, 0], workers.said
    assert complaints(workers) == []
    begins = [line[1] for line in told(tmp_path / "run") if line[0] == "begin"]
    assert begins == ["0", "12"]
    assert checkpointing.list_checkpoints(tmp_path / "run")[-1].step == NUM_STEPS


# ---- restarts


# CI: reliability/test_09_processes.py kills processes of all these runs, and starts them again.
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="replicated", marks=pytest.mark.soak),
        pytest.param(
            ["init.checkpoint.asynchronous=true"], id="asynchronous", marks=pytest.mark.soak
        ),
        pytest.param([SHARDED], id="sharded", marks=pytest.mark.soak),
    ],
)
def test_a_run_whose_processes_are_killed_five_times_ends_as_if_they_had_not(
    tmp_path, changes
) -> None:
    generator, limit = random.Random(str(changes)), tmp_path / "limit"
    given = [*changes, "init.checkpoint.steps=3", f"init.callbacks[Tell].limit={limit}"]
    given.append("init.callbacks[Tell].pause=0.05")
    with Workers(tmp_path / "w", command(tmp_path / "whole", *given)) as workers:
        assert workers.codes() == [0, 0], workers.said
    expected = weights(tmp_path / "whole")
    folder = tmp_path / "run"
    words = command(folder, *given)
    set_limit(limit, 4)  # steps for each attempt, so that none comes to the end before its kill
    with Launched(tmp_path / "l", words, options=["--max-restarts=5"]) as launched:
        for number in range(1, 6):
            wait_until(lambda number=number: _num_begun(folder) >= number, what=launched.said)
            time.sleep(generator.uniform(0, 0.4))
            _kill(launched, generator.randrange(2))
            set_limit(limit, 4 * (number + 1) if number < 5 else NUM_STEPS + 1)
            wait_until(lambda number=number: _num_begun(folder) > number, what=launched.said)
        assert launched.code() == 0, launched.said
        assert launched.left(GONE_S) == []
    for rank in range(2):
        found = weights(folder, rank)
        assert {step: found[step] for step in expected} == expected
    assert unfinished(folder) == []
    for info in checkpointing.list_checkpoints(folder):
        assert checkpointing.verify(info.path) == []


def _num_begun(folder: Path) -> int:
    """Return how many attempts have come to train."""
    return min(sum(line[0] == "begin" for line in told(folder, rank)) for rank in range(2))


def _kill(launched: Launched, rank: int) -> None:
    wait_until(lambda: rank in launched.workers())
    with contextlib.suppress(ProcessLookupError):
        os.kill(launched.workers()[rank], signal.SIGKILL)


@pytest.mark.slow
def test_what_torchrun_is_told_reaches_all(tmp_path) -> None:
    folder = tmp_path / "run"
    limit = tmp_path / "limit"
    set_limit(limit, 12)  # is not taken before the signal has been heeded
    words = command(folder, f"init.callbacks[Tell].limit={limit}", "init.callbacks[Tell].pause=0.1")
    with Launched(tmp_path / "l", words) as launched:
        wait_until(lambda: _num_begun(folder) >= 1, what=launched.said)
        launched.process.terminate()
        assert launched.left(GONE_S) == []
    ends = [told(folder, rank)[-1] for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0][0] == "end"
    assert checkpointing.list_checkpoints(folder)[-1].step == int(ends[0][1])
    assert sum("stopping after this step" in line for line in launched.said.splitlines()) == 1
