"""Saves by another process, which copies frozen memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import BackgroundSaver, frozen_memory
from modelzoo_trainer.checkpointing.background import HostBuffer
from modelzoo_trainer.checkpointing.frozen_memory import (
    PAGE,
    are_private,
    can_protect,
    merged,
    protect,
    register,
    split,
)
from modelzoo_trainer.errors import is_refusal_of_disk

MIB = 1 << 20
needs_protection = pytest.mark.skipif(
    not can_protect(), reason="this user or kernel may not protect memory (userfaultfd)"
)


def make_state(value=0.0, mib=4, num=3):
    tensors = {str(idx): torch.full((mib * MIB // 4,), value + idx) for idx in range(num)}
    return {
        "model": tensors | {"small": torch.full((5,), value), "turned": torch.ones(3, 2).t()},
        "list": [value],
    }


def make_lone_state(mib=4, num=3):
    """Return a state that shares no page with memory that Python needs."""
    memory = mmap.mmap(-1, (num + 1) * mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    every = torch.frombuffer(memory, dtype=torch.float32)[16:]
    parts = every[: num * mib * MIB // 4].chunk(num)
    return {"model": {str(idx): part.fill_(idx) for idx, part in enumerate(parts)}, "list": [0.0]}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def guard_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return int(children)


def ends(pid):
    """Whether a process ends within a minute."""
    end = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.fixture
def saver(tmp_path):
    """Return a saver whose process runs: its first save is a copy."""
    saver = BackgroundSaver(least_frozen=0)
    yield saver
    saver._land()
    if saver._process is not None:
        saver._process.close()


@pytest.fixture
def copied(monkeypatch):
    """Return a list with the size of every state that is copied instead, in bytes."""
    sizes, copy = [], HostBuffer.copy

    def measured(buffer, tensors):
        found = copy(buffer, tensors)
        sizes.append(buffer.num_bytes)
        return found

    monkeypatch.setattr(HostBuffer, "copy", measured)
    return sizes


def start(saver, tmp_path, state):
    saver.save(tmp_path / "first", state, step=0)
    saver.wait()
    assert saver._process is not None
    assert saver._buffer.num_bytes == 0  # freed
    return saver._process


# ---- what is saved


@needs_protection
def test_nothing_that_is_written_afterwards_in_any_way_is_in_the_file(tmp_path, saver, copied):
    state = make_state()
    start(saver, tmp_path, state)
    every = state["model"]
    weights = torch.nn.Parameter(every["0"])
    view, address = every["1"].numpy(), every["2"].data_ptr()
    for step in range(1, 4):
        expected = {name: tensor.clone() for name, tensor in every.items()}
        saver.save(tmp_path / f"c_{step}", state, step=step)
        weights.data.add_(1)
        view[::-1][:1000] += 5
        view[:] -= 1
        ctypes.memset(address + 3 * MIB, 7, MIB)
        every["small"].zero_()
        state["list"].append(step)
        with Path("/dev/zero").open("rb", buffering=0) as zero:  # a write by the kernel
            assert zero.readinto(memoryview(view).cast("B")[MIB : 2 * MIB]) == MIB
        assert len(copied) == 1  # the first save
        assert saver.wait() == [tmp_path / f"c_{step}"]
        found = checkpointing.load(tmp_path / f"c_{step}")
        assert all(torch.equal(found["model"][name], expected[name]) for name in expected)
        assert found["list"] == [0.0, *range(1, step)]


@needs_protection
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path, saver, copied):
    tied = torch.rand(MIB)
    flat = torch.rand(MIB)
    state = make_state() | {
        "tied": [tied, tied, tied.view(4, -1), flat[1000:], flat[:200_000], flat],
        "empty": torch.empty(0, 2),
        "x": torch.tensor(1),
        "bfloat16": torch.rand(MIB).to(torch.bfloat16),
        "complex": torch.rand(MIB, dtype=torch.complex64),
        "numpy": np.arange(300_000),
    }
    start(saver, tmp_path, state)
    checkpointing.save(tmp_path / "a" / "c", state, step=1, facts={"x": 1})
    saver.save(tmp_path / "b" / "c", state, step=1, facts={"x": 1})
    assert len(copied) == 1  # the first save
    saver.wait()
    first = {file.name: file.read_bytes() for file in (tmp_path / "a/c").iterdir()}
    assert first == {file.name: file.read_bytes() for file in (tmp_path / "b/c").iterdir()}


@needs_protection
def test_a_part_of_a_checkpoint_of_several_ranks_is_frozen_too(tmp_path, saver):
    state = make_state() | {"array": np.arange(3), "more": [np.ones((3, 2)).T]}
    for step in range(2):
        saver.save_sharded(tmp_path / f"c_{step}", state, step=step, process_group=None)
        saver.wait()
    assert saver._process is not None
    assert saver._stager is None
    saver.save_sharded(tmp_path / "c", state, step=2, process_group=None)
    for name in "012":
        state["model"][name].numpy()[:] = 9
    state["array"][:] = 9
    state["more"][0][:] = 9
    state["list"].append(9)
    saver.wait()
    assert saver._stager is None  # nothing was copied by this process
    found = checkpointing.load(tmp_path / "c")
    assert [found["model"][name].unique().tolist() for name in "012"] == [[0], [1], [2]]
    assert (found["array"].tolist(), found["list"]) == ([0, 1, 2], [0.0])
    assert found["more"][0].tolist() == [[1, 1, 1], [1, 1, 1]]


@needs_protection
@pytest.mark.parametrize("kind", ["shared", "other process", "file", "turned", "small"])
def test_what_cannot_be_frozen_is_copied(tmp_path, copied, kind):
    least = 1 << 30 if kind == "small" else 0
    saver = BackgroundSaver(least_frozen=least)
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * MIB))
    made = {
        "shared": lambda: torch.zeros(MIB).share_memory_(),
        "other process": lambda: torch.frombuffer(mmap.mmap(-1, 4 * MIB), dtype=torch.float32),
        "file": lambda: torch.from_file(str(file), shared=False, size=MIB),
        "turned": lambda: torch.zeros(1024, 1024).t(),
        "small": lambda: torch.zeros(MIB),
    }
    state = {"model": {"w": made[kind]()}}
    for step in range(3):
        saver.save(tmp_path / f"c_{step}", state, step=step)
        state["model"]["w"].add_(1)
        assert len(copied) == step + 1
        assert copied[-1] >= 4 * MIB
        saver.wait()
        found = checkpointing.load(tmp_path / f"c_{step}")["model"]["w"]
        assert found.unique().tolist() == [step]


@needs_protection
def test_a_tensor_at_another_place_is_copied_once(tmp_path, saver, copied):
    start(saver, tmp_path, make_state())
    state = make_state(5, mib=7)
    saver.save(tmp_path / "c_1", state, step=1)
    assert len(copied) == 2
    saver.wait()
    saver.save(tmp_path / "c_2", state, step=2)
    assert len(copied) == 2
    saver.wait()
    assert checkpointing.load(tmp_path / "c_2")["model"]["0"].unique().tolist() == [5]


def test_without_protection_everything_is_copied(tmp_path, saver, monkeypatch):
    monkeypatch.setattr("modelzoo_trainer.checkpointing.frozen_state.can_protect", lambda: False)
    state = make_state()
    for step in range(3):
        saver.save(tmp_path / f"c_{step}", state, step=step)
        state["model"]["0"].add_(1)
        saver.wait()
        found = checkpointing.load(tmp_path / f"c_{step}")["model"]["0"]
        assert found.unique().tolist() == [step]
    assert saver._process is None


@needs_protection
def test_a_write_with_the_interpreters_lock_while_memory_is_being_frozen_does_not_block(
    tmp_path, saver, monkeypatch
):
    state = make_state()
    start(saver, tmp_path, state)
    address = state["model"]["0"].data_ptr() + 2 * MIB
    hold = ctypes.PyDLL(None)  # unlike CDLL, calls keep the lock

    def protect_and_write(fault, pages):
        protect(fault, pages)
        hold.memset(ctypes.c_void_p(address), 0xFF, ctypes.c_size_t(MIB))

    monkeypatch.setattr("modelzoo_trainer.checkpointing.frozen_state.protect", protect_and_write)
    saver.save(tmp_path / "c", state, step=1)
    saver.wait()
    found = checkpointing.load(tmp_path / "c")["model"]["0"]
    assert found.unique().tolist() == [0]
    assert state["model"]["0"].isnan().any()


# ---- failures


@needs_protection
def test_an_error_of_the_disk_is_reported_and_the_next_save_works(tmp_path, saver):
    state = make_state()
    start(saver, tmp_path, state)
    limit = resource.prlimit(saver._process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(saver._process.pid, resource.RLIMIT_FSIZE, (MIB, limit[1]))
    saver.save(tmp_path / "c_1", state, step=1)
    with pytest.raises(CheckpointError, match="c_1' could not be saved: File too large") as caught:
        saver.wait()
    assert is_refusal_of_disk(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    resource.prlimit(saver._process.pid, resource.RLIMIT_FSIZE, limit)
    saver.save(tmp_path / "c_2", state, step=2)
    assert saver.wait() == [tmp_path / "c_2"]
    assert saver._process is not None


@needs_protection
@pytest.mark.parametrize("stage", ["idle", "copying", "writing"])
def test_a_process_that_is_killed_fails_its_save_and_the_next_is_written_by_a_thread(
    tmp_path, saver, stage
):
    state = make_lone_state(mib=16)
    process = start(saver, tmp_path, state)
    if stage == "copying":
        os.kill(process.pid, signal.SIGSTOP)
        saver.save(tmp_path / "c_1", state, step=1)
        os.kill(process.pid, signal.SIGKILL)
    elif stage == "writing":
        real = process.ask

        def ask(message, limit_s=None):
            if message and "write" in message:
                os.kill(process.pid, signal.SIGKILL)
            return real(message, limit_s)

        process.ask = ask
        saver.save(tmp_path / "c_1", state, step=1)
    else:
        os.kill(process.pid, signal.SIGKILL)
    if stage == "idle":
        process._process.wait(60)
        saver.save(tmp_path / "c_1", state, step=1)  # copied: nothing is lost
        assert saver.wait() == [tmp_path / "c_1"]
    else:
        state["model"]["0"].add_(1)  # does not wait for a process that is gone
        with pytest.raises(CheckpointError, match="ended by SIGKILL") as caught:
            saver.wait()
        assert is_refusal_of_disk(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["first"]
    saver.save(tmp_path / "c_2", state, step=2)
    assert saver.wait() == [tmp_path / "c_2"]
    assert saver._process is None


@needs_protection
@pytest.mark.parametrize("holds_lock", [False, True])
def test_a_process_that_hangs_is_ended(tmp_path, saver, monkeypatch, holds_lock):
    """Also while no other thread of the run can do anything."""
    monkeypatch.setattr("modelzoo_trainer.checkpointing.frozen_state._COPY_S", 0.3)
    state = make_lone_state()
    process = start(saver, tmp_path, state)
    guard = guard_of(process)
    weights = state["model"]["0"]
    os.kill(process.pid, signal.SIGSTOP)
    saver.save(tmp_path / "c_1", state, step=1)
    write = (ctypes.PyDLL if holds_lock else ctypes.CDLL)(None).memset
    write(ctypes.c_void_p(weights.data_ptr()), 0, ctypes.c_size_t(weights.nbytes))
    with pytest.raises(CheckpointError, match="did not answer"):
        saver.wait()
    assert not is_running(process.pid)
    assert ends(guard)
    saver.save(tmp_path / "c_2", state, step=2)
    assert saver.wait() == [tmp_path / "c_2"]


@needs_protection
def test_without_its_guard_the_process_is_given_up(tmp_path, saver):
    state = make_state()
    process = start(saver, tmp_path, state)
    guard = guard_of(process)
    os.kill(guard, signal.SIGKILL)
    assert ends(guard)
    saver.save(tmp_path / "c_1", state, step=1)
    assert saver.wait() == [tmp_path / "c_1"]
    assert saver._process is None
    assert not is_running(process.pid)


@needs_protection
def test_a_guard_outlives_slow_writing_and_ends_with_its_process(tmp_path, saver, monkeypatch):
    monkeypatch.setattr("modelzoo_trainer.checkpointing.frozen_state._COPY_S", 1.5)
    state = make_state()
    process = start(saver, tmp_path, state)
    guard = guard_of(process)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(guard, number)
    real = process.ask

    def ask(message, limit_s=None):
        time.sleep(2 if message else 0)
        return real(message, limit_s)

    process.ask = ask
    saver.save(tmp_path / "c_1", state, step=1)
    assert saver.wait() == [tmp_path / "c_1"]
    assert is_running(guard)
    process.close()
    assert ends(guard)


@needs_protection
def test_signals_to_the_run_do_not_end_the_process(tmp_path, saver):
    state = make_state()
    process = start(saver, tmp_path, state)
    assert os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(process.pid, number)
    saver.save(tmp_path / "c_1", state, step=1)
    assert saver.wait() == [tmp_path / "c_1"]
    assert saver._process is process


# ---- processes and memory


@needs_protection
def test_the_process_ends_with_its_saver(tmp_path):
    saver = BackgroundSaver(least_frozen=0)
    process = start(saver, tmp_path, make_state())
    pid = process.pid
    assert is_running(pid)
    del saver, process
    gc.collect()
    assert not is_running(pid)


@needs_protection
def test_the_process_holds_no_file_of_the_run_and_no_torch(tmp_path, saver):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        process = start(saver, tmp_path, make_state())
        held = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert str(tmp_path / "open") not in held
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@needs_protection
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_are_forked_meanwhile_can_write_to_the_state(tmp_path, saver):
    state = make_lone_state()
    process = start(saver, tmp_path, state)
    os.kill(process.pid, signal.SIGSTOP)
    saver.save(tmp_path / "c_1", state, step=1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            state["model"]["0"].add_(1)
            del saver._process
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.kill(process.pid, signal.SIGCONT)
    assert saver.wait() == [tmp_path / "c_1"]
    assert saver._process is process
    assert checkpointing.load(tmp_path / "c_1")["model"]["0"].unique().tolist() == [0]


@needs_protection
def test_no_memory_and_no_descriptor_is_kept(tmp_path, saver):
    state = make_state(mib=8)
    process = start(saver, tmp_path, state)

    def save(step):
        saver.save(tmp_path / f"c_{step}", state, step=step)
        saver.wait()

    def held(pid):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * PAGE // MIB, len(list(Path(f"/proc/{pid}/fd").iterdir()))

    save(1)
    before = held(process.pid), held(os.getpid())
    for step in range(2, 12):
        save(step)
    after = held(process.pid), held(os.getpid())
    for old, new in zip(before, after, strict=True):
        assert new[0] <= old[0] + 8
        assert new[1] == old[1]


# ---- memory


def test_ranges_are_merged_and_split_at_whole_pages():
    assert merged([(10, 5), (12, 1), (15, 5), (30, 0), (40, 1)]) == [(10, 10), (40, 1)]
    big = 1 << 20
    pages, rest = split([(PAGE + 16, big), (PAGE + 100, 50), (10 * big, 100)])
    assert pages == [(2 * PAGE, big - PAGE)]
    assert rest == [(PAGE + 16, PAGE - 16), (PAGE + big, 16), (10 * big, 100)]


def test_tensors_without_a_whole_page_between_them_are_protected_together():
    big = 1 << 20
    ranges = [(64, big), (big + PAGE + 64, big), (2 * (big + PAGE) + 64, 100)]
    pages, rest = split(ranges)
    assert pages == [(PAGE, 2 * big + PAGE)]
    assert rest == [(64, PAGE - 64), (2 * (big + PAGE) + 64, 100)]
    apart = [(64, big), (big + 2 * PAGE, big)]
    assert split(apart)[0] == [(PAGE, big - PAGE), (big + 2 * PAGE, big)]


@needs_protection
def test_a_writer_waits_and_a_reader_does_not():
    tensor = torch.zeros(MIB)
    pages, _ = split([(tensor.data_ptr(), tensor.nbytes)])
    fault = register(pages)
    protect(fault, pages)
    assert tensor.sum() == 0
    done = threading.Event()

    def write():
        tensor.add_(1)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not done.wait(0.2)
    os.close(fault)  # as when the other process is killed
    thread.join(60)
    assert done.is_set()


@needs_protection
def test_memory_of_a_file_is_not_private(tmp_path):
    own = torch.zeros(MIB)
    assert are_private([(own.data_ptr(), own.nbytes)])
    shared = torch.frombuffer(mmap.mmap(-1, 4 * MIB), dtype=torch.float32)
    assert not are_private([(shared.data_ptr(), shared.nbytes)])
    assert not are_private([(1 << 20, 10)])


def test_a_kernel_that_refuses_is_noticed(monkeypatch):
    def refuse():
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(frozen_memory, "_open", refuse)
    frozen_memory.can_protect.cache_clear()
    try:
        assert not can_protect()
    finally:
        frozen_memory.can_protect.cache_clear()
