"""Processes fail together, by the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backends.coordination import coordinator as coordinator_module
from backends.coordination import failures, heartbeat
from backends.coordination.coordinator import Coordinator
from backends.coordination.failures import Failure, RunFailed, gone
from backends.coordination.launch import read_launch
from backends.coordination.liveness import StallTimer, own_identity
from backends.coordination.rendezvous import open_store
from tests.distributed.ranks import run_ranks, try_ranks

PATIENCE_S = 60.0
FOREVER_S = 1000.0


def _control(rank: int, **options: float) -> tuple[dist.Store, Coordinator]:
    # How long the product waits for what comes at last is not what is tested.
    coordinator_module._PUBLISH_S = coordinator_module._LINGER_S = failures._ON_ABORT_S = PATIENCE_S
    launch = read_launch()
    store = open_store(launch, timeout_s=PATIENCE_S)
    control = Coordinator(dist.PrefixStore("control", store), rank, launch.world_size, **options)
    control.start()
    return store, control


def _all_ready(store: dist.Store, num: int) -> None:
    store.add("ready", 1)
    while store.add("ready", 0) < num:
        time.sleep(0.01)


def _all_done(store: dist.Store, rank: int, num: int) -> None:
    # The store ends with the first process.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < num:
        time.sleep(0.01)


def _heard(control: Coordinator) -> Failure | None:
    control._is_known.wait(PATIENCE_S)
    return control.failure


def _one_fails(rank: int) -> tuple[Failure | None, Failure | None]:
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 3)
    mine = control.fail("disk full", code=7) if rank == 1 else None
    heard = _heard(control)
    _all_done(store, rank, 3)
    return mine, heard


def test_all_processes_hear_of_a_failure() -> None:
    failure = Failure(1, "disk full", 7)

    found = run_ranks(3, _one_fails)

    assert found == [(None, failure), (failure, failure), (None, failure)]


def _all_fail(rank: int) -> Failure:
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 4)
    failure = control.fail(f"error {rank}", code=rank + 1)
    _all_done(store, rank, 4)
    return failure


@pytest.mark.slow
def test_of_many_failures_all_processes_name_the_same_first_one() -> None:
    found = run_ranks(4, _all_fail)

    assert len(set(found)) == 1
    assert found[0].message == f"error {found[0].rank}"


def _knows_rank_0(rank: int) -> bool:
    coordinator_module._BEAT_S = FOREVER_S  # later heartbeats are not what is tested
    launch = read_launch()
    store = open_store(launch, timeout_s=PATIENCE_S)
    control = Coordinator(dist.PrefixStore("control", store), rank, 2)
    while rank == 0 and not store.check(["control/who/1"]):  # it starts first
        time.sleep(0.01)
    control.start()
    deadline = time.monotonic() + PATIENCE_S
    while not control._beats.knows_host and time.monotonic() < deadline:
        time.sleep(0.01)
    _all_done(store, rank, 2)
    return control._beats.knows_host


def test_rank_0_is_known_soon_after_it_starts() -> None:
    # Else nobody sees that it was stopped, since its store does not respond then.
    assert run_ranks(2, _knows_rank_0) == [True, True]


def _consequence(rank: int) -> Failure:
    coordinator_module._CAUSE_S = PATIENCE_S
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 3)
    if rank == 2:
        while not store.check(["control/here"]):  # the others look for the cause
            time.sleep(0.01)
        failure = control.fail("out of memory")
    else:
        failure = control.fail("Connection closed by peer", kind="lost")
    _all_done(store, rank, 3)
    return failure


@pytest.mark.slow
def test_a_lost_connection_waits_for_its_cause() -> None:
    assert run_ranks(3, _consequence) == [Failure(2, "out of memory")] * 3


def _answers_late(rank: int) -> Failure | None:
    coordinator_module._CAUSE_S, heartbeat._LIVENESS_CHECK_S = 1.0, 0.1
    if rank == 1:
        _hear_after(lambda store: store.wait(["told"]))
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 2)
    if rank == 0:
        control.fail("Connection closed by peer", kind="lost")
        store.set("control/told", "yes")
    heard = _heard(control)
    _all_done(store, rank, 2)
    return heard


def _hear_after(wait: Callable[[dist.Store], object]) -> None:
    """Have this process take nothing in before something has happened."""
    hear = Coordinator._hear

    def hear_late(control: Coordinator, *entry: Any) -> None:
        wait(control._listening.store)
        hear(control, *entry)

    Coordinator._hear = hear_late


@pytest.mark.slow
def test_a_process_of_this_host_that_answers_late_is_not_taken_for_gone() -> None:
    failure = Failure(0, "Connection closed by peer", kind="lost")
    assert run_ranks(2, _answers_late) == [failure] * 2


def test_who_has_failed_tells_it_unless_another_process_had_to_find_out() -> None:
    assert Failure(1, "disk full").reporting_rank == 1
    assert gone(1, reporter=2).reporting_rank == 2


def _all_lost(rank: int) -> Failure:
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 2)
    failure = control.fail(f"Connection closed by peer {1 - rank}", kind="lost")
    _all_done(store, rank, 2)
    return failure


@pytest.mark.slow
def test_a_lost_connection_without_another_cause_is_the_failure() -> None:
    found = run_ranks(2, _all_lost)

    assert found[0] == found[1]
    assert found[0].message == f"Connection closed by peer {1 - found[0].rank}"


def _killed(rank: int, victim: int) -> tuple[int, str, str]:
    coordinator_module._CAUSE_S = PATIENCE_S
    store, control = _control(rank, grace=PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        failure = control.fail(str(error), kind="lost")
        return failure.rank, failure.message, failure.kind
    return -1, "nothing happened", ""


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_by_all_others() -> None:
    found = try_ranks(3, _killed, 1)

    gone = (1, "process 1 is gone (it was killed or has crashed)", "lost")
    assert found == [(True, gone), (False, "ended with exit code -9"), (True, gone)]


@pytest.mark.slow
def test_the_first_process_is_named_as_well_although_the_store_dies_with_it() -> None:
    found = try_ranks(3, _killed, 0)

    gone = (0, "process 0 is gone (it was killed or has crashed)", "lost")
    assert found == [(False, "ended with exit code -9"), (True, gone), (True, gone)]


def _stuck(rank: int, victim: int, sign: int, path: str) -> None:
    # Nobody's main thread does anything about the failure: the threads end the processes.
    _, control = _control(rank, grace=0.3)
    # The store ends with the first process.
    others = [] if rank else [Path(path) / str(r) for r in (1, 2) if r != victim or not sign]
    control.on_abort = lambda failure: _write(Path(path) / str(rank), str(failure), others)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    dist.barrier()
    while 0 not in control._beats._identities:
        time.sleep(0.01)
    dist.barrier()
    if rank == victim:
        if not sign:
            control.fail("bad batch", code=9)
        else:
            os.kill(os.getpid(), sign)
    time.sleep(FOREVER_S)


def _write(path: Path, text: str, others: list[Path]) -> Any:
    path.write_text(text)
    while not all(other.exists() for other in others):
        time.sleep(0.01)
    raise ValueError("last words are not heard")


@pytest.mark.slow
def test_a_process_that_is_stuck_is_ended_with_the_code_after_its_last_words(
    tmp_path: Path,
) -> None:
    found = try_ranks(3, _stuck, 2, 0, str(tmp_path))

    assert found == [(False, "ended with exit code 9")] * 3
    assert {(tmp_path / str(rank)).read_text() for rank in range(3)} == {"process 2: bad batch"}


@pytest.mark.slow
def test_a_process_that_is_killed_ends_those_that_do_not_notice(tmp_path: Path) -> None:
    found = try_ranks(3, _stuck, 1, signal.SIGKILL, str(tmp_path))

    assert [text for _, text in found] == [
        "ended with exit code 1",
        "ended with exit code -9",
        "ended with exit code 1",
    ]
    said = "process 1 is gone (it was killed or has crashed)"
    assert (tmp_path / "0").read_text() == (tmp_path / "2").read_text() == said


@pytest.mark.slow
def test_a_process_that_is_stopped_is_killed_and_ends_the_others(tmp_path: Path) -> None:
    found = try_ranks(3, _stuck, 1, signal.SIGSTOP, str(tmp_path))

    assert found[1] == (False, "ended with exit code -9")
    assert found[0] == found[2] == (False, "ended with exit code 1")
    said = (tmp_path / "2").read_text()
    assert said == "process 1 was stopped by a signal and not continued for 3 s"


@pytest.mark.slow
def test_the_first_process_stopped_is_killed_although_its_store_does_not_answer(
    tmp_path: Path,
) -> None:
    found = try_ranks(3, _stuck, 0, signal.SIGSTOP, str(tmp_path))

    assert found[0] == (False, "ended with exit code -9")
    assert found[1] == found[2] == (False, "ended with exit code 1")
    assert (tmp_path / "2").read_text().startswith("process 0 ")


def _in_vain(rank: int) -> str:
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 2)
    if rank == 1:
        with suppress(RunFailed):
            while True:
                control.decided()
    failure = control.fail("all_reduce timed out", kind="hang") if rank == 0 else control.failure
    _all_done(store, rank, 2)
    return str(failure)


def test_a_main_thread_that_comes_to_a_point_after_a_failure_raises() -> None:
    assert run_ranks(2, _in_vain) == ["process 0: all_reduce timed out"] * 2


_PROGRAM = """
import os, sys, time
from pathlib import Path
from tests.distributed.test_failures import _all_ready, _control, _write

def waits_for_nobody():
    _all_ready(store, 2)
    if rank == 1:
        control.fail("all_reduce has waited 600 s", kind="hang")
    time.sleep(1000)

rank = int(os.environ["RANK"])
store, control = _control(rank, grace=0.5)
said = [Path(__file__).with_name(str(one)) for one in range(2)]
control.on_abort = lambda failure: _write(said[rank], str(failure), said)
waits_for_nobody()
"""


@pytest.mark.slow
def test_a_hang_shows_where_every_process_is(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--monitor-interval=0.1", str(program)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, check=False
    )

    assert done.returncode == 1
    for rank in range(2):
        assert f'stacks of process {rank} ("process 1: all_reduce has waited' in done.stderr
    assert "in waits_for_nobody" in done.stderr


def test_the_stacks_of_a_process_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(failures.os, "write", lambda _, text: written.append(text))

    failures.dump_stacks(1, Failure(0, "all_reduce has waited 600 s", kind="hang"))

    (text,) = written
    assert text.startswith(b'--- stacks of process 1 ("process 0: all_reduce has waited')
    assert b"in test_the_stacks_of_a_process_are_written_at_once" in text


def _leaves(rank: int) -> Failure | None:
    store, control = _control(rank, alive_timeout=PATIENCE_S, grace=PATIENCE_S)
    _all_ready(store, 3)
    control.stop()
    return control.failure


@pytest.mark.slow
def test_processes_that_say_good_bye_are_not_taken_for_dead() -> None:
    assert run_ranks(3, _leaves, stay=False) == [None] * 3


def _hears_late(rank: int) -> Failure | None:
    if rank == 1:
        _hear_after(_until_gone)
    store, control = _control(rank, grace=PATIENCE_S)
    _all_ready(store, 2)
    control.propose("what keeps the other's thread busy")
    control.stop()
    return control.failure


def _until_gone(store: dist.Store) -> None:
    with suppress(dist.DistError):
        while True:
            store.add("here", 0)
            time.sleep(0.01)


@pytest.mark.slow
def test_the_store_may_end_before_a_process_has_heard_that_the_run_is_over() -> None:
    assert run_ranks(2, _hears_late, stay=False) == [None] * 2


def _goes_early(rank: int) -> Failure | None:
    store, control = _control(rank, alive_timeout=5.0, grace=0.2)
    _all_ready(store, 3)
    if rank == 1:
        control.stop()
        while store.get("control/alive/1") != b"left":  # its thread may be late
            time.sleep(0.01)
        return None
    time.sleep(3)  # its end is seen with the next sign, within a second
    found = control.failure
    control.stop()
    return found


@pytest.mark.slow
def test_a_process_that_has_said_good_bye_may_end_before_the_others() -> None:
    assert run_ranks(3, _goes_early, stay=False) == [None] * 3


def test_only_time_at_work_counts_as_silence() -> None:
    timer = StallTimer(interval_s=0.01)
    timer.is_stalled("beat", 0.05)
    time.sleep(0.2)

    assert not timer.is_stalled("beat", 0.05)


def test_silence_ends_with_the_next_sign() -> None:
    timer = StallTimer(interval_s=10)
    timer.is_stalled("beat", 0.05)
    time.sleep(0.1)

    assert timer.is_stalled("beat", 0.05)
    assert not timer.is_stalled("another", 0.05)


def test_a_process_is_known_by_its_start_not_by_its_number_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = own_identity()
    other = type(own)(own.host, child.pid, own.born + "0")
    other.kill()

    assert other.is_gone()
    assert child.poll() is None
    assert not own.is_gone()
    child.kill()
    child.communicate()
