"""Decisions that all processes take at the same point."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from backends.coordination.consensus import Consensus
from backends.coordination.coordinator import Coordinator
from backends.coordination.failures import Failure, RunFailed
from backends.coordination.launch import read_launch
from backends.coordination.rendezvous import open_store
from tests.distributed.ranks import run_ranks

PATIENCE_S = 60.0
NEAR = 50  # points that a process is ahead of others at most


def _control(rank: int) -> tuple[dist.Store, Coordinator]:
    launch = read_launch()
    store = open_store(launch, timeout_s=PATIENCE_S)
    # With patience the first process, which has the store, leaves as the last one.
    prefixed = dist.PrefixStore("control", store)
    control = Coordinator(prefixed, rank, launch.world_size, grace=PATIENCE_S)
    control.start()
    return store, control


def _lockstep(rank: int, num_rounds: int) -> list[tuple[int, tuple[str, ...]]]:
    store, control = _control(rank)
    num = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num)
    found = _walk(rank, control, num_rounds, lambda point: dist.all_reduce(torch.ones(1)))
    dist.barrier()
    control.stop()
    return found


def _drifting(rank: int, num_rounds: int) -> list[tuple[int, tuple[str, ...]]]:
    store, control = _control(rank)
    num = int(os.environ["WORLD_SIZE"])

    def stay_near(point: int) -> None:
        # Without a bound the slowest has to come to where the fastest was, longer in each round.
        if point % NEAR == 0:
            store.add(f"at/{point}", 1)
            while store.add(f"at/{point}", 0) < num:
                time.sleep(0.001)

    found = _walk(rank, control, num_rounds, stay_near)
    store.add("done", 1)
    while store.add("done", 0) < num:
        time.sleep(0.01)
    control.stop()
    return found


def _walk(
    rank: int, control: Coordinator, num_rounds: int, come_to: Callable[[int], object]
) -> list[tuple[int, tuple[str, ...]]]:
    # In each round one process or two, known to all, propose something, after some points.
    ours, mine = random.Random(0), random.Random(rank)
    found: list[tuple[int, tuple[str, ...]]] = []
    point = 0
    while len(found) < num_rounds:
        proposers = {ours.randrange(3), ours.randrange(3)}
        topic = ours.choice(("save", "stop", "validate"))
        delay = ours.randrange(2)
        while True:
            point += 1
            if delay == 0 and rank in proposers:
                control.propose(topic if mine.random() < 0.7 else "other")
            delay -= 1
            if mine.random() < 0.3:
                time.sleep(mine.random() * 0.001 * (rank + 1))
            come_to(point)
            topics = control.decided()
            if topics:
                found.append((point, topics))
                break
    return found


@pytest.mark.slow
def test_in_lockstep_all_processes_return_the_same_topics_at_the_same_points() -> None:
    found = run_ranks(3, _lockstep, 40)

    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 40


@pytest.mark.slow
def test_processes_that_drift_apart_return_the_same_topics_at_the_same_points() -> None:
    found = run_ranks(4, _drifting, 20)

    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) == 20


def _signalled(rank: int) -> list[tuple[int, tuple[str, ...]]]:
    store, control = _control(rank)
    signal.signal(signal.SIGUSR1, lambda *_: control.propose("SIGUSR1"))
    store.set(f"pid/{rank}", str(os.getpid()))
    if rank == 0:
        pids = [int(store.get(f"pid/{other}")) for other in range(3)]
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        store.set("sent", "yes")
    while not store.check(["sent"]):  # no main thread goes on before all have theirs
        time.sleep(0.001)
    found = [_next_decision(control)]
    control.propose("again")
    found.append(_next_decision(control))
    store.add("done", 1)
    while store.add("done", 0) < 3:
        time.sleep(0.01)
    control.stop()
    return found


def _next_decision(control: Coordinator) -> tuple[int, tuple[str, ...]]:
    while not (topics := control.decided()):
        time.sleep(0.001)
    return control._consensus.point, topics


@pytest.mark.slow
def test_a_signal_to_all_processes_becomes_one_decision_and_another_topic_may_follow() -> None:
    found = run_ranks(3, _signalled)

    assert found[0] == found[1] == found[2]
    assert [topics for _, topics in found[0]] == [("SIGUSR1",), ("again",)]


def _late(rank: int) -> tuple[str, ...]:
    store, control = _control(rank)
    if rank == 0:
        while not control._listening.is_over:
            time.sleep(0.01)
        control.propose("too late")
        store.get("told")
    else:
        threading.Timer(0.3, store.set, ["told", "yes"]).start()
        control.stop()
        return ()
    topics = control.decided()
    control.stop()
    return topics


def test_a_proposal_is_dropped_after_a_process_has_come_to_its_last_point() -> None:
    assert run_ranks(2, _late) == [(), ()]


def test_the_main_thread_waits_at_its_next_point_until_a_proposal_is_decided() -> None:
    decisions = Consensus()
    decisions.decided()
    answer = decisions.hold(0)
    found: list[tuple[str, ...]] = []
    main = threading.Thread(target=lambda: found.extend(decisions.decided() for _ in range(3)))
    main.start()
    deadline = time.monotonic() + PATIENCE_S
    while decisions.point < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    main.join(0.05)
    is_waiting = main.is_alive() and decisions.point == 2
    decisions.commit(0, "save", 4)
    main.join()

    assert (answer, is_waiting) == (1, True)
    assert found == [(), (), ("save",)]


def test_topics_for_one_point_come_in_the_order_of_their_proposals() -> None:
    decisions = Consensus()
    decisions.hold(3)
    decisions.hold(4)
    decisions.commit(4, "stop", 1)
    decisions.commit(3, "save", 1)

    assert decisions.decided() == ("save", "stop")
    assert decisions.decided() == ()


def test_a_main_thread_that_waits_is_woken_when_the_run_fails() -> None:
    decisions = Consensus()
    decisions.hold(0)
    threading.Timer(0.05, decisions.abort, [Failure(1, "disk full")]).start()

    with pytest.raises(RunFailed, match="process 1: disk full"):
        decisions.decided()


def test_a_commit_of_what_was_dropped_does_nothing() -> None:
    decisions = Consensus()
    decisions.hold(0)
    decisions.drop()
    decisions.commit(0, "save", 1)

    assert decisions.decided() == ()
