"""Every call that changes the disk fails once: EIO, ENOSPC, EDQUOT, EROFS, EINTR, a short write."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from modelzoo_trainer.errors import CheckpointError
from tests.reliability.disk_calls import WRITES, Call, Counter, Tap, half_of
from tests.reliability.scenarios import DEEDS, EXPORTED, NEW, OLD
from tests.reliability.states import leftovers, loads, make, visible

pytestmark = pytest.mark.slow

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS")
SAVES = [("save", error) for error in ERRORS] + [("save_later", "ENOSPC")]
SAVES += [pytest.param("save_later", error, marks=pytest.mark.soak) for error in ERRORS]


def failing(name: str):
    number = getattr(errno, name)

    def fail(call: Call, perform):
        if call.name == "close":
            perform()  # a file is closed, whatever close says
        raise OSError(number, os.strerror(number), str(call.path))

    return fail


def calls_of(folder: Path, deed: str) -> list[Call]:
    prepare(folder, deed)
    counter = Counter()
    with Tap(folder, counter):
        DEEDS[deed](folder)
    shutil.rmtree(folder)
    return counter.calls


def prepare(folder: Path, deed: str) -> None:
    make(folder, 1)
    if deed == "prune":
        make(folder, 2)


def attempt(folder: Path, deed: str, counter: Counter) -> CheckpointError | None:
    """Do something to a folder; only one kind of error may come of it."""
    try:
        with Tap(folder, counter):
            DEEDS[deed](folder)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.slow_cases("save-EIO", "save-EROFS")
@pytest.mark.parametrize(("deed", "error"), SAVES)
def test_a_save_that_fails_at_any_call_says_why_and_leaves_nothing(
    tmp_path, count, deed, error
) -> None:
    folder = tmp_path / "run"
    num = len(calls_of(folder, deed))
    raised = 0
    for at in range(num):
        prepare(folder, deed)
        counter = Counter(at, failing(error))
        found = attempt(folder, deed, counter)
        assert counter.has_struck
        where = f"{counter.calls[at].name} of {counter.calls[at].path.name}"
        assert loads(folder / OLD), where
        assert leftovers(folder) == [], where
        assert (folder / NEW in visible(folder)) == (found is None), where
        if found is not None:
            raised += 1
            assert NEW in str(found), where
            assert os.strerror(getattr(errno, error)) in str(found), where
            DEEDS[deed](folder)  # the next attempt
        assert loads(folder / NEW), where
        shutil.rmtree(folder)
    count(faults=num, raised=raised, survived=num - raised)
    assert raised > 0.9 * num


@pytest.mark.slow_cases("*-EIO", "*-EROFS")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("deed", ["prune", "export"])
def test_nothing_else_is_lost_when_a_deletion_or_an_export_fails(
    tmp_path, count, deed, error
) -> None:
    folder = tmp_path / "run"
    num = len(calls_of(folder, deed))
    for at in range(num):
        prepare(folder, deed)
        counter = Counter(at, failing(error))
        found = attempt(folder, deed, counter)
        where = f"{counter.calls[at].name} of {counter.calls[at].path.name}"
        assert loads(folder / (NEW if deed == "prune" else OLD)), where
        assert all(loads(path) for path in visible(folder)), where
        if deed == "export" and found is not None:
            assert os.strerror(getattr(errno, error)) in str(found), where
            assert sorted(os.listdir(folder)) == [OLD], where
        if deed == "export" and found is None:
            assert checkpointing.read_weights(folder / EXPORTED).keys() >= {"weight"}, where
        shutil.rmtree(folder)
    count(faults=num)


def interrupted(call: Call, perform):
    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))


def short(call: Call, perform):
    return half_of(call)


@pytest.mark.parametrize("deed", ["save", "save_later", "export"])
@pytest.mark.parametrize("how", [interrupted, short], ids=["eintr", "short"])
def test_a_write_that_is_short_or_interrupted_is_gone_on_with(tmp_path, count, deed, how) -> None:
    folder = tmp_path / "run"
    calls = calls_of(folder, deed)
    writes = [number for number, call in enumerate(calls) if call.name in WRITES]
    assert len(writes) >= 2
    for at in writes:
        prepare(folder, deed)
        assert attempt(folder, deed, Counter(at, how)) is None
        assert all(loads(path) for path in visible(folder))
        assert len(visible(folder)) == (1 if deed == "export" else 2)
        shutil.rmtree(folder)
    count(faults=len(writes))


@pytest.mark.parametrize("deed", ["save", "save_later"])
def test_all_that_a_save_does_to_the_disk_is_seen_by_these_tests(tmp_path, deed) -> None:
    folder = tmp_path / "run"
    calls = calls_of(folder, deed)
    written = sum(_length(call) for call in calls if call.name in WRITES)
    prepare(folder, deed)
    DEEDS[deed](folder)
    assert written == sum(path.stat().st_size for path in (folder / NEW).iterdir())


def _length(call: Call) -> int:
    data = call.arguments[1]
    return sum(map(len, data)) if isinstance(data, list) else memoryview(data).nbytes
