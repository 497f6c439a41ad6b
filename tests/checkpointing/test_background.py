"""Saving while the run goes on."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import BackgroundSaver, background, disk, load_save
from modelzoo_trainer.checkpointing.background import HostBuffer

ROOT = Path(__file__).resolve().parents[2]


def make_state(value=1.0, size=1000):
    return {
        "model": {"w": torch.full((size,), value), "turned": torch.full((3, 2), value).t()},
        "numpy": np.full(5, value),
        "list": [value],
        "dict": {"a": value},
    }


class Slow:
    """A disk whose first `sync` waits until it is told to go on."""

    def __init__(self, patch, error=None):
        self.reached = threading.Event()
        self.go_on = threading.Event()
        real = disk.sync

        def sync(fd):
            self.reached.set()
            assert self.go_on.wait(120)
            if error is not None:
                raise error
            real(fd)

        patch.setattr(disk, "sync", sync)


@pytest.fixture
def slow(monkeypatch):
    disk = Slow(monkeypatch)
    yield disk
    disk.go_on.set()


@pytest.fixture
def saver():
    saver = BackgroundSaver()
    yield saver
    saver._land()


def test_nothing_that_changes_afterwards_is_in_the_file(tmp_path, slow, saver):
    state = make_state()
    saver.save(tmp_path / "c", state, step=1)
    state["model"]["w"].fill_(7)
    state["model"]["turned"].fill_(7)
    state["numpy"][:] = 7
    state["list"].append(7)
    state["dict"]["b"] = 7
    slow.go_on.set()
    assert saver.wait() == [tmp_path / "c"]
    found = checkpointing.load(tmp_path / "c")
    assert found["model"]["w"].unique().tolist() == [1]
    assert found["model"]["turned"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found["numpy"].tolist() == [1] * 5
    assert (found["list"], found["dict"]) == ([1], {"a": 1})


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path, saver, is_sharded):
    tied = torch.rand(100)
    state = make_state() | {"tied": [tied, tied], "empty": torch.empty(0, 2), "x": torch.tensor(1)}
    state["wide"] = torch.rand(7, 3, dtype=torch.float64)[:, 1].to(torch.bfloat16)
    conjugated = torch.tensor([1 + 2j]).conj()
    state["complex"] = {"conjugated": conjugated, "negated": conjugated.imag}
    state["tuple"] = (torch.nn.Parameter(torch.ones(3)), np.ones((2, 3)).T)
    facts = {"step": 1, "facts": {"x": 1}}
    if is_sharded:
        checkpointing.save_sharded(tmp_path / "a" / "c", state, **facts)
        saver.save_sharded(tmp_path / "b" / "c", state, process_group=None, **facts)
    else:
        checkpointing.save(tmp_path / "a" / "c", state, **facts)
        saver.save(tmp_path / "b" / "c", state, **facts)
    saver.wait()
    first = {file.name: file.read_bytes() for file in (tmp_path / "a/c").iterdir()}
    assert first == {file.name: file.read_bytes() for file in (tmp_path / "b/c").iterdir()}


def test_the_run_goes_on_while_it_is_written(tmp_path, slow, saver):
    saver.save(tmp_path / "c", make_state(), step=1)
    assert slow.reached.wait(120)
    assert saver.is_busy
    assert saver.collect() == []
    assert checkpointing.list_checkpoints(tmp_path) == []
    slow.go_on.set()
    assert saver.wait() == [tmp_path / "c"]
    assert not saver.is_busy
    assert saver.collect() == []


def test_a_second_save_waits_for_the_first(tmp_path, slow, saver):
    saver.save(tmp_path / "c_1", make_state(1), step=1)
    assert slow.reached.wait(120)
    threading.Timer(0.05, slow.go_on.set).start()
    saver.save(tmp_path / "c_2", make_state(2), step=2)
    assert checkpointing.verify(tmp_path / "c_1") == []
    assert saver.wait() == [tmp_path / "c_1", tmp_path / "c_2"]
    assert checkpointing.load(tmp_path / "c_1")["list"] == [1]
    assert checkpointing.load(tmp_path / "c_2")["list"] == [2]
    assert saver.stall_s > 0


def test_a_path_comes_back_as_it_was_given(tmp_path, saver, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver.save(Path("c"), {}, step=1)
    assert saver.wait() == [Path("c")]


@pytest.mark.parametrize("ask", ["collect", "wait"])
def test_a_failure_is_raised_once_and_the_next_save_works(tmp_path, refusing, saver, ask):
    def run():
        saver.save(tmp_path / "c_1", make_state(), step=1)
        saver._land()

    error = OSError(errno.ENOSPC, "No space left on device")
    _, caught = refusing(4, error, run)
    assert caught is None
    with pytest.raises(CheckpointError, match="c_1' could not be saved: No space left"):
        getattr(saver, ask)()
    assert getattr(saver, ask)() == []
    assert list(tmp_path.iterdir()) == []
    saver.save(tmp_path / "c_2", make_state(), step=2)
    assert saver.wait() == [tmp_path / "c_2"]


def test_a_failure_is_not_lost_when_the_next_save_begins(tmp_path, refusing, saver):
    saver.save(tmp_path / "c_0", make_state(), step=0)
    saver._land()

    def run():
        saver.save(tmp_path / "c_1", make_state(), step=1)
        saver._land()

    refusing(4, OSError(errno.EIO, "Input/output error"), run)
    saver.save(tmp_path / "c_2", make_state(), step=2)
    with pytest.raises(CheckpointError, match="c_1' could not be saved: Input/output"):
        saver.wait()
    assert saver.wait() == [tmp_path / "c_0", tmp_path / "c_2"]


def test_whatever_ends_the_thread_is_raised_and_leaves_nothing(tmp_path, refusing, saver):
    def run():
        saver.save(tmp_path / "c", make_state(), step=1)
        saver.wait()

    _, caught = refusing(5, MemoryError(), run)
    assert type(caught) is MemoryError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "step", "message"),
    [({"x": {1}}, 1, "x is a set"), ({}, -1, "got -1"), ({1: 1}, 1, "must be str")],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, saver, state, step, message):
    with pytest.raises(CheckpointError, match=message):
        saver.save(tmp_path / "c", state, step=step)
    assert not saver.is_busy
    assert saver.wait() == []
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_refused_at_once(tmp_path, saver):
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        saver.save(tmp_path / "c", {}, step=1)
    assert saver.wait() == []


def test_a_thread_that_cannot_be_started_leaves_nothing(tmp_path, saver, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        saver.save(tmp_path / "c", make_state(), step=1)
    monkeypatch.undo()
    assert saver.wait() == []
    assert list(tmp_path.iterdir()) == []


# ---- memory


def test_the_memory_of_the_copy_is_used_again(tmp_path, saver):
    places = set()
    for step in range(4):
        saver.save(tmp_path / f"c_{step}", make_state(step), step=step)
        saver.wait()
        places.add(saver._buffer._memory.data_ptr())
    assert len(places) == 1
    found = [checkpointing.load(tmp_path / f"c_{step}")["list"] for step in range(4)]
    assert found == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("sizes", "num_bytes"), [((100, 90), 448), ((100, 10), 64), ((10, 100), 448)]
)
def test_a_state_of_another_size_gets_other_memory(sizes, num_bytes):
    buffer = HostBuffer()
    for size in sizes:
        source = torch.rand(size)
        copy = buffer.copy({"model": {"w": source}})["model"]["w"]
        assert torch.equal(copy, source)
        assert copy.data_ptr() != source.data_ptr()
    assert buffer.num_bytes == num_bytes


def test_large_tensors_are_copied_by_several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sources = {str(size): torch.rand(size) for size in (1 << 22, 3, 9_000_001, 1 << 22)}
        copies = HostBuffer().copy({"model": sources})["model"]
    finally:
        torch.set_num_threads(before)
    assert list(copies) == list(sources)
    assert all(torch.equal(copies[name], tensor) for name, tensor in sources.items())


def test_copies_do_not_overlap():
    sources = {str(idx): torch.full((idx,), idx, dtype=torch.uint8) for idx in range(130)}
    copies = HostBuffer().copy({"a": sources, "b": {"x": torch.full((70,), 200.0)}})
    assert all(copies["a"][name].tolist() == [int(name)] * int(name) for name in sources)
    assert copies["b"]["x"].unique().tolist() == [200]


def test_a_saver_that_is_dropped_frees_its_memory(tmp_path):
    saver = BackgroundSaver()
    saver.save(tmp_path / "c", make_state(), step=1)
    saver.wait()
    memory = saver._buffer._memory.untyped_storage()._weak_ref()
    del saver
    gc.collect()
    assert torch.UntypedStorage._new_with_weak_ptr(memory) is None


# ---- the end of the program, and other processes

PROGRAM = """
import sys, torch
from pathlib import Path
from modelzoo_trainer import checkpointing
checkpointing.BackgroundSaver().save(
    Path(sys.argv[1]), {"model": {"w": torch.arange(4_000_000.0)}}, step=1
)
raise SystemExit(7)
"""


@pytest.mark.slow
def test_a_save_under_way_is_finished_when_the_program_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c")], cwd=ROOT, check=False
    )
    assert done.returncode == 7
    assert checkpointing.load(tmp_path / "c")["model"]["w"][-1] == 3_999_999


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_are_forked_meanwhile_neither_hang_nor_commit(tmp_path, slow, saver):
    saver.save(tmp_path / "c", make_state(), step=1)
    assert slow.reached.wait(120)
    loader = torch.utils.data.DataLoader(
        range(8), num_workers=2, collate_fn=sum, multiprocessing_context="fork", timeout=60
    )
    assert list(loader) == list(range(8))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if not saver.is_busy and saver.wait() == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slow.go_on.set()
    assert saver.wait() == [tmp_path / "c"]
    assert checkpointing.verify(tmp_path / "c") == []


def test_memory_for_copies_from_a_device_is_there_without_one_too():
    assert background._new_memory(10, is_pinned=True).shape == (10,)


def test_a_save_that_fails_before_its_first_file_leaves_nothing(tmp_path, monkeypatch) -> None:
    def fail(tensors: object) -> object:
        raise MemoryError

    monkeypatch.setattr(load_save, "bytes_of", fail)
    saver = BackgroundSaver()
    saver.save(tmp_path / "checkpoint_1", make_state(), step=1)
    with pytest.raises(MemoryError):
        saver.wait()
    assert list(tmp_path.iterdir()) == []
