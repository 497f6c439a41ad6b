"""Several processes end together: by the first failure, or at the same step by a signal."""

from __future__ import annotations

import atexit
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from tests.distributed.launching import (
    Workers,
    command,
    set_limit,
    told,
    unfinished,
    wait_until,
    weights,
)

GONE_S = 30.0  # patience; how long it takes is measured in the long form
NUM_STEPS = 24
LAST_STEP = 20  # that is taken before a signal has been heeded
FIRST = "ValueError: this is the first error"
CONSEQUENCES = ("onnection", "TCPStore", "recvValue", "gloo", "NCCL", "RunFailed")
WHY = (
    r"process \d is gone \(it was killed or has crashed\)",
    r"Process \d of 2 cannot connect to the others: .*",  # it does not know them yet
    r"process \d: stopped by (SIG\w+|Ctrl-C|a signal)",  # it ends slowly
    r"The run was stopped by SIG\w+ at global_step \d+: .*",  # it had begun
)
MAY_SAY = (
    *WHY,
    r"SIG\w+: stopping after this step; .*",
    r"\[E.* ProcessGroupGloo\.cpp:\d+\] Gloo connectFullMesh failed .*",  # torch's log
)
PLACES = ("step", "validation", "save")
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
FEW = [("step", 0), ("validation", 1), ("save", 0)]
OTHERS = [(where, rank) for where in PLACES for rank in range(2) if (where, rank) not in FEW]
REST = [pytest.param(*one, marks=SLOW) for one in OTHERS]
REST_OF_SLOW = [pytest.param(*one, marks=SOAK) for one in OTHERS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """The weights after each step of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with Workers(folder.parent / "output", command(folder)) as workers:
        assert workers.codes() == [0, 0], workers.said
    return weights(folder)


class Disturbed:
    """A run in which something happens to one process."""

    def __init__(self, place: Path, how: str, where: str, rank: int, *changes: str) -> None:
        self.folder = place / "run"
        self.mark = place / "mark"
        self.limit = place / "limit"
        given = {"how": repr(how), "where": where, "rank": rank, "mark": self.mark}
        words = [f"init.callbacks[Disturb].{name}={value}" for name, value in given.items()]
        limit = f"init.callbacks[Tell].limit={self.limit}"
        self.words = command(self.folder, limit, *words, *changes)
        self.output = place / "output"

    def start(self) -> Workers:
        return Workers(self.output, self.words)

    def goes_on(self, undisturbed: dict[int, set[str]]) -> None:
        """The same command comes to the end that it would have come to."""
        self.limit.unlink(missing_ok=True)
        with self.start() as workers:
            assert workers.codes() == [0, 0], workers.said
        for rank in range(2):
            assert weights(self.folder, rank)[NUM_STEPS] == undisturbed[NUM_STEPS]
        assert_whole(self.folder)


def any_of(line: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in patterns)


def assert_whole(folder: Path) -> None:
    """What there is of checkpoints is intact, and nothing is left of others."""
    assert unfinished(folder) == []
    for info in checkpointing.list_checkpoints(folder):
        assert checkpointing.verify(info.path) == []


def assert_gone(workers: Workers, timeout_s: float = GONE_S) -> list[int | None]:
    """All have ended in time, and nothing that they have started lives."""
    codes = workers.codes(timeout_s)
    assert None not in codes, workers.said
    assert workers.left(timeout_s) == []
    return codes


# CI: each phase; the main process, and another.
@pytest.mark.soak_cases("step-1", "validation-0", "save-1")
@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [*FEW, *REST])
def test_an_error_of_one_ends_all_and_is_shown_once(tmp_path, undisturbed, where, rank) -> None:
    run = Disturbed(tmp_path, "raise", where, rank)
    with run.start() as workers:
        workers.wait_for_one()
        assert assert_gone(workers) == [1, 1]
        said = workers.said
    assert said.startswith(f"process {rank} failed:\n[rank{rank}]: Traceback")
    assert said.count("Traceback") == said.count(FIRST) == 1
    assert not any(word in said for word in CONSEQUENCES)
    assert_whole(run.folder)
    if (where, rank) == FEW[-1]:
        run.goes_on(undisturbed)


# CI: SIGKILL in each phase; an exit, which is noticed in the same way, in one.
@pytest.mark.slow
@pytest.mark.soak_cases("exit-*", "!exit-7-step-0")
@pytest.mark.parametrize(("where", "rank"), [*FEW, *REST])
@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), pytest.param("exit", 7, marks=SLOW)])
def test_the_end_of_one_ends_all_and_is_told_once(
    tmp_path, undisturbed, how, code, where, rank
) -> None:
    run = Disturbed(tmp_path, how, where, rank)
    with run.start() as workers:
        workers.wait_for_one()
        codes = assert_gone(workers)
        said = workers.said
    assert (codes[rank], codes[1 - rank]) == (code, 1)
    assert said == f"process {rank} is gone (it was killed or has crashed)\n"
    if where == "save":
        run.goes_on(undisturbed)


# CI: in a step and in a save.
@pytest.mark.soak_cases("validation-1")
@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [*FEW, *REST_OF_SLOW])
def test_a_process_that_hangs_is_shown_where_it_does(tmp_path, where, rank) -> None:
    run = Disturbed(tmp_path, "hang", where, rank, "init.backend.timeout=6")
    with run.start() as workers:
        workers.wait_for_one()
        assert assert_gone(workers) == [1, 1]
        hanging, waiting = workers.said_by(rank), workers.said_by(1 - rank)
    [line] = [
        number for number, line in enumerate(_source(), 1) if line.endswith("# here it hangs\n")
    ]
    assert f'disturbing.py", line {line} in _act' in hanging
    assert "Traceback" not in hanging
    assert f"process {1 - rank}: timed out after 6 s" in waiting
    assert waiting.count("Traceback") == 1
    assert_whole(run.folder)


def _source() -> list[str]:
    path = Path(__file__).with_name("disturbing.py")
    return path.read_text(encoding="ascii").splitlines(keepends=True)


# CI: in a step and in a validation.
@pytest.mark.soak_cases("save-0")
@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [*FEW, *REST_OF_SLOW])
def test_a_process_that_was_stopped_is_taken_for_lost(tmp_path, undisturbed, where, rank) -> None:
    run = Disturbed(tmp_path, "SIGSTOP", where, rank, "init.backend.timeout=60")
    with run.start() as workers:
        wait_until(run.mark.exists)
        codes = assert_gone(workers)
        said = workers.said
    assert (codes[rank], codes[1 - rank]) == (-9, 1)
    assert said == f"process {rank} was stopped by a signal and not continued for 3 s\n"
    run.goes_on(undisturbed)


# CI: in a validation and in a save.
@pytest.mark.soak_cases("step")
@pytest.mark.slow_cases("save")
@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=SLOW) for where in PLACES[:2]] + [PLACES[2]]
)
def test_a_process_that_is_late_is_waited_for(tmp_path, undisturbed, where) -> None:
    run = Disturbed(tmp_path, "late", where, 1)
    with run.start() as workers:
        assert workers.codes() == [0, 0]
        assert workers.said == ""
    assert weights(run.folder)[NUM_STEPS] == undisturbed[NUM_STEPS]


# ---- signals


def _moments(seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    while True:
        yield generator.randrange(1, NUM_STEPS - 6)


def _interrupted(run: Disturbed, number: int, ranks: tuple[int, ...], after_step: int) -> int:
    """Send a signal when a process has come to a step; return where all of them have ended."""
    name = signal.Signals(number).name
    set_limit(run.limit, LAST_STEP)
    with run.start() as workers:
        wait_until(lambda: len(told(run.folder, ranks[0])) > after_step)
        for rank in ranks:
            workers.send(rank, number)
        code = 130 if name == "SIGINT" else 143
        assert assert_gone(workers) == [code, code], workers.said
        assert "Traceback" not in workers.said
    ends = [told(run.folder, rank)[-1] for rank in range(2)]
    assert ends[0] == ends[1]
    word, step, reason = ends[0]
    assert (word, reason) == ("end", name)
    return int(step)


# CI: each signal; the main process, another and both; at other moments by hand.
@pytest.mark.soak_cases("15-ranks[369]-*", "10-ranks1[58]-*", "2-ranks2[147]-*")
@pytest.mark.slow
@pytest.mark.slow_cases("15-ranks0-1", "2-ranks2-3")
@pytest.mark.parametrize(
    ("number", "ranks", "seed"),
    [
        (signal.SIGTERM, (1,), 1),
        (signal.SIGTERM, (0, 1), 2),
        (signal.SIGINT, (0,), 3),
        *(
            pytest.param(number, ranks, seed, marks=SLOW if seed == 10 else SOAK)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
            for ranks in ((0,), (1,), (1, 0))
            for seed in range(10, 13)
        ),
    ],
)
def test_a_signal_ends_all_at_the_same_step_and_the_run_goes_on_from_there(
    tmp_path, undisturbed, number, ranks, seed
) -> None:
    run = Disturbed(tmp_path, "", "step", 0, "init.callbacks[Tell].pause=0.02")
    step = _interrupted(run, number, ranks, next(_moments(seed)))
    assert step < NUM_STEPS
    assert_whole(run.folder)
    assert checkpointing.list_checkpoints(run.folder)[-1].step == step
    run.goes_on(undisturbed)
    begins = [line[1] for line in told(run.folder) if line[0] == "begin"]
    assert begins == ["0", str(step)]


@pytest.mark.slow_cases("SIGTERM-validation-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "rank"),
    [
        ("SIGTERM", "validation", 1),
        pytest.param("SIGTERM", "save", 1, marks=SLOW),
        pytest.param("SIGINT", "validation", 0, marks=SLOW),
        pytest.param("SIGUSR1", "save", 0, marks=SLOW),
    ],
)
def test_a_signal_during_a_validation_or_a_save_likewise(
    tmp_path, undisturbed, name, where, rank
) -> None:
    run = Disturbed(tmp_path, name, where, rank)
    set_limit(run.limit, LAST_STEP)
    with run.start() as workers:
        code = 130 if name == "SIGINT" else 143
        assert workers.codes() == [code, code]
        assert "Traceback" not in workers.said
    ends = [told(run.folder, rank)[-1] for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0][2] == name
    assert checkpointing.list_checkpoints(run.folder)[-1].step == int(ends[0][1])
    run.goes_on(undisturbed)


def _repeat_signals_at_exit() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        atexit.register(signal.raise_signal, number)


@pytest.mark.slow
def test_signals_to_processes_that_exit_already_do_nothing(tmp_path, undisturbed) -> None:
    words = command(tmp_path / "run")
    with Workers(tmp_path / "w", words, prepare=_repeat_signals_at_exit) as workers:
        assert (workers.codes(), workers.said) == ([0, 0], "")
    assert weights(tmp_path / "run")[NUM_STEPS] == undisturbed[NUM_STEPS]


# CI: each signal, and each rank.
@pytest.mark.soak_cases("2-2-1", "2-9-0", "2-15-0")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("trials", [2, pytest.param(20, marks=SOAK)])
def test_a_process_that_ends_while_the_run_starts_leaves_nothing(
    tmp_path, number, rank, trials
) -> None:
    generator = random.Random(f"{number} {rank}")
    for trial in range(trials):
        run = Disturbed(tmp_path / str(trial), "", "step", 0)
        set_limit(run.limit, LAST_STEP)  # it cannot end by itself before it has been looked at
        with run.start() as workers:
            wait_until((tmp_path / str(trial) / "output" / f"said-{rank}").exists)
            workers.wait_for_handlers(rank)  # until then what Python does follows
            time.sleep(generator.uniform(0, 0.2))
            if told(run.folder):
                continue  # it has begun
            workers.send(rank, number)
            workers.wait_for_one()
            workers.send(1 - rank, signal.SIGTERM)  # as a launcher does
            codes = assert_gone(workers)
            assert codes[rank] in (-number, 128 + number)
            lines = workers.said.splitlines()
            assert [line for line in lines if not any_of(line, MAY_SAY)] == []
            assert sum(any_of(line, WHY) for line in lines) <= 1, lines
        assert_whole(run.folder)
