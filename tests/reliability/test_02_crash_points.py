"""A crash before every call that changes the disk, in a save, a deletion and an export."""

from __future__ import annotations

import shutil

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability.disk_calls import Counter, Tap
from tests.reliability.forkserver_tasks import CRASHED
from tests.reliability.scenarios import DEEDS, EXPORTED, NEW, OLD
from tests.reliability.states import leftovers, loads, make, visible

pytestmark = pytest.mark.slow


def prepared(folder, deed):
    """Return a folder for a deed: what is there before it is never lost by it."""
    make(folder, 1)
    if deed == "prune":
        make(folder, 2)
    return folder


def num_calls(tmp_path, deed) -> int:
    folder = prepared(tmp_path / "counted", deed)
    counter = Counter()
    with Tap(folder, counter):
        DEEDS[deed](folder)
    return len(counter.calls)


def check(folder, deed) -> None:
    """Check that what is seen in a folder is whole, and that nothing else was lost."""
    assert all(loads(path) for path in visible(folder))
    kept = NEW if deed == "prune" else OLD
    assert loads(folder / kept)
    if (folder / EXPORTED).exists():
        weights = checkpointing.read_weights(folder / EXPORTED)
        assert set(weights) == {"weight", "bias", "count"}


def check_next(folder, deed) -> None:
    """Check that the next run clears up, and can do what the crashed one could not."""
    checkpointing.clean(folder)
    assert leftovers(folder) == []
    if deed.startswith("save") and not (folder / NEW).exists():
        DEEDS[deed](folder)
    assert all(loads(path) for path in visible(folder))


@pytest.mark.slow_cases("save", "save_later")
@pytest.mark.parametrize("deed", DEEDS)
def test_a_crash_at_any_call_leaves_the_old_or_the_new(nursery, tmp_path, count, deed) -> None:
    num = num_calls(tmp_path, deed)
    assert num >= 3
    for at in range(num):
        folder = prepared(tmp_path / f"at-{at}", deed)
        assert nursery.run("forkserver_tasks:crash", deed, str(folder), at).code == CRASHED
        check(folder, deed)
        check_next(folder, deed)
        shutil.rmtree(folder)
    folder = prepared(tmp_path / "done", deed)
    assert nursery.run("forkserver_tasks:crash", deed, str(folder), num).code == 0
    check(folder, deed)
    count(crashes=num)
