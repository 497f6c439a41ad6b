"""Several processes: one, or all, killed, stopped, late, or with a full disk."""

from __future__ import annotations

import itertools
import random
import signal
import time
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from tests.distributed.launching import Workers, command, told, unfinished, wait_until, weights

NUM_STEPS = 24
LONGEST_S = 0.8
GONE_S = 10.0  # in the long form; elsewhere the machine may stand still for a while
PATIENCE_S = 30.0
MANY = 30
SOON_LOST = "init.backend.timeout=3"
EVERY = "init.checkpoint.steps=2"
LATER = "init.checkpoint.asynchronous=true"
SHARDED = "init.backend.parallel={shard: -1}"
MAX_STARTS = 200
PLANS = {"plain": [], "asynchronous": [LATER], "sharded": [SHARDED, LATER]}
FULL = "could not be saved in process 1: No space left on device"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function from a plan to the weights after each step of a run that nothing happens to."""
    made: dict[str, dict[int, set[str]]] = {}

    def weights_of(name: str) -> dict[int, set[str]]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "run"
            with Workers(folder.parent / "output", words_of(folder, name)) as workers:
                assert workers.codes() == [0, 0], workers.said
            made[name] = weights(folder)
        return made[name]

    return weights_of


def words_of(folder: Path, name: str, **disturbance: object) -> list[str]:
    given = [f"init.callbacks[Disturb].{key}={value}" for key, value in disturbance.items()]
    return command(folder, EVERY, *PLANS[name], *given)


def unequal(folder: Path, expected: dict[int, set[str]]) -> int:
    """Return after how many steps some process had other weights, in any attempt."""
    found = [weights(folder, rank) for rank in range(2)]
    return sum(one[step] != expected[step] for one in found for step in one)


def lost(folder: Path) -> int:
    """Return how many attempts began before a checkpoint that an earlier one must have written."""
    begins = [int(line[1]) for line in told(folder) if line[0] == "begin"]
    return sum(later < earlier for earlier, later in itertools.pairwise(begins))


def damaged(folder: Path) -> int:
    found = checkpointing.list_checkpoints(folder)
    return sum(checkpointing.verify(one.path) != [] for one in found)


def as_a_launcher_does(workers: Workers, limit_s: float) -> list[int | None]:
    """End all when one has ended."""
    workers.wait_for_one()
    for rank in range(2):
        workers.send(rank, signal.SIGTERM)
    return workers.codes(limit_s)


# CI: one and all of them, replicated; all of them, sharded.
@pytest.mark.soak_cases("sharded-4-one")
@pytest.mark.slow_cases("asynchronous-2-all", "asynchronous-2-one")
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("asynchronous", 2),
        pytest.param("sharded", 4, marks=pytest.mark.slow),
        *(pytest.param(name, MANY, marks=pytest.mark.soak) for name in PLANS),
    ],
)
def test_killed_at_random_instants_it_ends_as_if_it_had_not_been(
    tmp_path, count, whole, name, kills, who
) -> None:
    expected = whole(name)
    generator = random.Random(f"{name} {who} {kills}")
    folder = tmp_path / "run"
    words = words_of(folder, name)
    num = starts = orphans = late = 0
    while starts < MAX_STARTS:
        starts += 1
        with Workers(tmp_path / "output", words) as workers:
            if num < kills:
                time.sleep(generator.uniform(0, LONGEST_S))
                victims = range(2) if who == "all" else [generator.randrange(2)]
                for rank in victims:
                    workers.send(rank, signal.SIGKILL)
                codes = as_a_launcher_does(workers, GONE_S if kills == MANY else PATIENCE_S)
                num += -signal.SIGKILL in codes
            else:
                codes = workers.codes()
            late += None in codes
            orphans += len(workers.left(GONE_S))
            assert "Traceback" not in workers.said, workers.said
        if codes == [0, 0]:
            if num >= kills:
                break
            folder = tmp_path / f"run-{starts}"
            words = words_of(folder, name)
        assert damaged(folder) == 0
    count(kills=num, starts=starts, orphans=orphans, late=late)
    count(unequal=unequal(folder, expected), lost=lost(folder))
    assert (unequal(folder, expected), lost(folder), orphans, late) == (0, 0, 0, 0)
    assert told(folder)[-1][:2] == ["end", str(NUM_STEPS)]
    assert unfinished(folder) == []


# CI: the main process; another one: tests/distributed/test_ending.py.
@pytest.mark.soak_cases("1")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_was_stopped_ends_all_in_time(tmp_path, count, whole, rank) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    stopped = words_of(folder, "plain", how="SIGSTOP", where="save", rank=rank, mark=mark)
    with Workers(tmp_path / "output", [*stopped, "--set", SOON_LOST]) as workers:
        wait_until(mark.exists)
        assert None not in workers.codes(PATIENCE_S)
        assert workers.left(GONE_S) == []
    assert damaged(folder) == 0
    with Workers(tmp_path / "output", stopped) as workers:
        assert workers.codes() == [0, 0], workers.said
    assert unequal(folder, whole("plain")) == 0
    assert unfinished(folder) == []
    count(stopped=1)


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("name", ["plain", pytest.param("asynchronous", marks=pytest.mark.slow)])
def test_while_the_disk_of_one_is_full_all_train_on_and_nothing_is_committed(
    tmp_path, count, whole, name
) -> None:
    folder = tmp_path / "run"
    words = words_of(folder, name, how="full", where="save", rank=1, step=10)
    with Workers(tmp_path / "output", words) as workers:
        assert workers.codes() == [0, 0], workers.said
        assert workers.said.count("NO CHECKPOINT WAS SAVED") == 1
        assert FULL in workers.said
    steps = [one.step for one in checkpointing.list_checkpoints(folder)]
    assert 10 not in steps
    assert {8, NUM_STEPS} <= set(steps)
    assert damaged(folder) == 0
    assert unfinished(folder) == []
    assert unequal(folder, whole(name)) == 0
    count(full_disks=1)
