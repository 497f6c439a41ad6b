"""No worker outlives the process that started it, and signals are left to that process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import pin_memory

from modelzoo_trainer.loading import workers
from modelzoo_trainer.loading.workers import BoundWorker, WorkerIterator, shut_down, start_iterator

PROGRAM = """
import os, signal, sys, threading, time
from torch.utils.data import DataLoader
from modelzoo_trainer.loading.workers import start_iterator

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, idx):
        if {hangs}:
            time.sleep(600)
        time.sleep(0.01)
        return idx

if __name__ == "__main__":
    loader = DataLoader(Slow(), num_workers=2, multiprocessing_context="{method}")
    if {in_thread}:
        made = []
        thread = threading.Thread(target=lambda: made.append(start_iterator(loader)))
        thread.start()
        thread.join()
        iterator = made[0]
    else:
        iterator = start_iterator(loader)
    print(*[worker.pid for worker in iterator.given._workers], flush=True)
    if {dies_at_once}:
        os.kill(os.getpid(), signal.SIGKILL)
    if not {hangs}:
        next(iterator)
    print("ready", flush=True)
    time.sleep(600)
"""


def start(tmp_path: Path, **settings: object) -> tuple[subprocess.Popen[str], list[int]]:
    """Return a process with two workers, and their ids."""
    options = {
        "method": "fork",
        "hangs": False,
        "in_thread": False,
        "dies_at_once": False,
    } | settings
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**options))
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return process, [int(word) for word in process.stdout.readline().split()]


def wait_until_gone(pids: list[int], limit_s: float = 90) -> list[int]:
    """Return those that still live after some seconds."""
    end = time.monotonic() + limit_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _patience(monkeypatch) -> None:
    """Let a process that was killed take longer to end, on a machine that stalls."""
    monkeypatch.setattr(workers, "_KILL_S", 60.0)


@pytest.mark.slow
@pytest.mark.slow_cases("True-fork")
@linux
@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("hangs", [False, True])
def test_no_worker_outlives_its_killed_parent(tmp_path, method, hangs) -> None:
    process, workers = start(tmp_path, method=method, hangs=hangs)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert len(workers) == 2
    assert wait_until_gone(workers) == []


@pytest.mark.slow
@linux
def test_a_worker_that_begins_after_its_parent_is_gone_ends(tmp_path) -> None:
    for _ in range(3):
        process, workers = start(tmp_path, dies_at_once=True)
        process.communicate()
        assert wait_until_gone(workers) == []


@linux
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.slow_cases(every=4)
def test_signals_of_a_group_do_not_end_workers(name) -> None:
    seen = []
    before = signal.signal(getattr(signal, name), lambda signum, frame: seen.append(signum))
    iterator = start_iterator(DataLoader(range(40), num_workers=2))
    try:
        assert len(list(islice(iterator, 2))) == 2  # each worker has loaded one
        for worker in iterator.workers:
            os.kill(worker.pid, getattr(signal, name))
        assert [batch.item() for batch in islice(iterator, 30)] == list(range(2, 32))
        assert seen == []
        assert all(worker.is_alive() for worker in iterator.workers)
    finally:
        shut_down(iterator)
        signal.signal(getattr(signal, name), before)


class Hanging(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, idx):
        time.sleep(600)


def test_a_worker_that_hangs_can_still_be_terminated() -> None:
    iterator = start_iterator(DataLoader(Hanging(), num_workers=1))
    [worker] = iterator.workers
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises
    try:
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL
    finally:
        shut_down(iterator)
        signal.signal(signal.SIGCHLD, before)


class Handlers(Dataset):
    """Tells which handlers a worker has, and those of a program that it starts."""

    def __len__(self):
        return 1

    def __getitem__(self, idx):
        names = ("SIGINT", "SIGTERM", "SIGUSR1")
        own = [getattr(signal.getsignal(getattr(signal, n)), "__name__", "") for n in names]
        code = "import signal; print(*[int(signal.getsignal(s) == signal.SIG_IGN) for s in %r])"
        numbers = [int(getattr(signal, name)) for name in names]
        program = [sys.executable, "-c", code % numbers]
        return own, subprocess.run(program, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
def test_the_pipes_of_workers_are_closed_without_the_garbage_collector() -> None:
    loader = DataLoader(range(4), num_workers=2)
    shut_down(start_iterator(loader))
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        threads = set(threading.enumerate())
        for _ in range(3):
            iterator = start_iterator(loader)
            assert len(list(iterator)) == 4
            shut_down(iterator)
        del iterator
        for thread in set(threading.enumerate()) - threads:
            thread.join(60)  # that of a queue closes its pipe when it ends
        after = len(os.listdir("/proc/self/fd"))
    finally:
        gc.enable()
    assert after < before + 4  # there were twelve pipes


def test_programs_that_a_worker_starts_get_signals_as_usual() -> None:
    iterator = start_iterator(DataLoader(Handlers(), batch_size=None, num_workers=1))
    own, started = next(iterator)
    shut_down(iterator)
    assert own == ["_ignore_signal"] * 3
    assert started == "0 0 0\n"


def test_a_loader_keeps_its_own_worker_init_fn() -> None:
    def init(worker_id):
        os.environ["GREETING"] = "hello"

    loader = DataLoader(Greeting(), batch_size=None, num_workers=1, worker_init_fn=init)
    iterator = start_iterator(loader)
    assert next(iterator) == "hello"
    assert loader.worker_init_fn is init
    shut_down(iterator)


class Greeting(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, idx):
        return os.environ["GREETING"]


@pytest.mark.slow
@pytest.mark.slow_cases("True")
@linux
@pytest.mark.parametrize("hangs", [False, True])
def test_no_worker_of_a_thread_outlives_its_killed_parent(tmp_path, hangs) -> None:
    process, workers = start(tmp_path, hangs=hangs, in_thread=True)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert wait_until_gone(workers) == []


def test_a_thread_that_ends_does_not_end_the_workers_that_it_started() -> None:
    iterators = []
    loader = DataLoader(range(40), num_workers=1)
    thread = threading.Thread(target=lambda: iterators.append(start_iterator(loader)))
    thread.start()
    thread.join()
    assert len(list(iterators[0])) == 40
    shut_down(iterators[0])


class NoSecond:
    """A start method by which only one worker can be started."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.started = []

    def __call__(self, process):
        if self.started:
            raise self.error
        self.started.append(process)
        return type(process)._Popen(process)


@pytest.mark.parametrize("error", [OSError("no memory to fork"), KeyboardInterrupt()])
def test_workers_started_before_an_error_are_ended(monkeypatch, error) -> None:
    opened = NoSecond(error)
    monkeypatch.setattr(workers, "_open_killable", opened)
    loader = DataLoader(range(4), num_workers=2)
    with pytest.raises(type(error)):
        start_iterator(loader)
    [worker] = opened.started
    assert worker.exitcode == -signal.SIGKILL
    assert loader.worker_init_fn is None
    assert loader.multiprocessing_context is None


class Interrupted(DataLoader):
    """Ctrl-C comes when its workers have been started, and one of them has torch's lock."""

    def __iter__(self):
        self.begun = super().__iter__()
        self.begun._workers_done_event._cond.acquire()
        raise KeyboardInterrupt


def test_the_end_of_workers_does_not_hide_why_they_were_ended() -> None:
    with pytest.raises(KeyboardInterrupt):
        start_iterator(Interrupted(range(4), num_workers=2))
    gc.collect()  # torch's iterator, which would wait for the lock
    assert multiprocessing.active_children() == []
    assert list(start_iterator([1])) == [1]  # nor is it an error of anybody else


@pytest.mark.parametrize("awaits", ["its batch", "another's", "a start", "a plain one's"])
@pytest.mark.slow_cases(every=4)
def test_a_worker_that_dies_is_an_error_only_where_data_is_awaited(awaits) -> None:
    iterator = start_iterator(DataLoader(range(40), num_workers=2))
    other = start_iterator(DataLoader(range(40), num_workers=1 if awaits == "another's" else 0))
    assert next(iterator) == 0
    kill_one_worker(iterator)  # not here
    error = pytest.raises(RuntimeError, match=r"DataLoader worker .* killed by signal")
    if awaits == "a start":
        with error:
            start_iterator(DataLoader(range(40), num_workers=2))
    else:
        with error:
            next(iterator if awaits == "its batch" else other)
    shut_down(iterator)
    shut_down(other)
    assert multiprocessing.active_children() == []


def kill_one_worker(iterator) -> None:
    """Kill one, and return when the kernel has told."""
    worker = iterator.workers[0]
    kill_and_hear([worker.pid])
    worker.join(60)


def kill_and_hear(pids: list[int]) -> None:
    """Kill workers, and return when the kernel has told: their threads may end last."""
    told = []
    before = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, lambda *event: [told.append(event), before(*event)])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pids) == []
    while not told:
        time.sleep(0.01)
    signal.signal(signal.SIGCHLD, before)


@linux
@pytest.mark.usefixtures("_limit")
def test_a_worker_that_died_with_a_lock_does_not_block_the_end_of_an_epoch() -> None:
    iterator = start_iterator(DataLoader(range(40), num_workers=2))
    iterator.given._workers_done_event._cond.acquire()  # as who dies within is_set() has
    kill_one_worker(iterator)
    shut_down(iterator)  # torch waits for ever
    assert not any(worker.is_alive() for worker in iterator.workers)


def test_a_worker_that_died_when_its_data_was_not_needed_only_logs_a_warning(caplog) -> None:
    iterator = start_iterator(DataLoader(range(40), num_workers=2))
    kill_one_worker(iterator)
    shut_down(iterator)
    assert "no longer needed" in caplog.text
    assert list(start_iterator([1])) == [1]


class Broken:
    """An iterator whose connection to its worker breaks."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __next__(self) -> object:
        raise self.error


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(), FileNotFoundError()])
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.slow_cases(every=4)
def test_a_worker_that_dies_while_its_last_batch_is_received_is_named(error, in_thread) -> None:
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    worker.start()
    iterator = WorkerIterator(Broken(error), [worker])
    with pytest.raises(RuntimeError, match="ended with exit code 3 while") as caught:
        call_in_thread(iterator) if in_thread else next(iterator)
    assert caught.value.__cause__ is error
    assert f"(pid {worker.pid})" in str(caught.value)


def call_in_thread(iterator: Iterator[object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(next, iterator).result()


def test_an_error_of_files_while_all_workers_live_stays_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(workers, "_DEATH_S", 0.01)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        with pytest.raises(FileNotFoundError, match="lost"):
            next(WorkerIterator(Broken(FileNotFoundError("lost")), [worker]))
    finally:
        worker.kill()
        worker.join()


class Long(Dataset):
    """Samples that go through a pipe, and do not fit into it."""

    def __len__(self):
        return 40

    def __getitem__(self, idx):
        return b"x" * 3_000_000


def as_it_is(batch):
    return batch


@pytest.fixture
def _limit() -> Iterator[None]:
    """Raise after some seconds, also out of a read that never ends."""

    def end(signum, frame):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 120)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def kill_workers_within_a_batch(given=None) -> None:
    """Kill all, and return when they have ended; nobody waits for them here.

    Args:
        given: Torch's iterator, whose next batch is waited for: it does not fit into the pipe.
    """
    if given is None:
        time.sleep(0.5)  # they write ahead
    else:
        assert given._worker_result_queue._reader.poll(60)
    kill_and_hear([worker.pid for worker in multiprocessing.active_children()])


@linux
@pytest.mark.usefixtures("_limit")
def test_kept_workers_that_died_between_passes_are_an_error_of_the_next_pass() -> None:
    loader = DataLoader(
        Long(), batch_size=1, num_workers=2, collate_fn=as_it_is, persistent_workers=True
    )
    iterator = start_iterator(loader)
    assert [len(next(iterator)) for _ in range(2)] == [1, 1]
    kill_workers_within_a_batch(iterator.given)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        start_iterator(loader)
    shut_down(iterator)
    assert multiprocessing.active_children() == []


@linux
@pytest.mark.usefixtures("_limit")
def test_workers_of_a_loader_that_hides_them_died_within_a_batch() -> None:
    loader = Doubled(Long(), batch_size=1, num_workers=2, collate_fn=as_it_is)
    iterator = start_iterator(loader)
    assert [len(next(iterator)) for _ in range(2)] == [2, 2]
    kill_workers_within_a_batch(loader.hidden())
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(iterator)
    iterator.given.close()


@pytest.mark.slow
@linux
@pytest.mark.usefixtures("_limit")
def test_the_thread_that_pins_memory_is_not_waited_for_when_a_worker_has_died(monkeypatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(pin_memory, "pin_memory", lambda data, device=None: data)
    loader = DataLoader(
        Long(), batch_size=1, num_workers=2, collate_fn=as_it_is, pin_memory=True, prefetch_factor=8
    )
    iterator = start_iterator(loader)
    assert iterator.given._pin_memory_thread.is_alive()
    assert [len(next(iterator)) for _ in range(2)] == [1, 1]
    kill_workers_within_a_batch()
    shut_down(iterator)
    assert not any(worker.is_alive() for worker in iterator.workers)


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow)],  # imports torch meanwhile
)
@pytest.mark.parametrize("kind", [DataLoader, "hidden"])
def test_signals_do_not_end_workers_that_are_being_started(method, kind) -> None:
    made = Doubled if kind == "hidden" else DataLoader
    loader = made(range(8), num_workers=2, multiprocessing_context=method)
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        iterator = start_iterator(loader)
        first = [] if kind != "hidden" else [next(iterator)]
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGTERM)
        assert len(first) + len(list(iterator)) == 8
    finally:
        signal.signal(signal.SIGTERM, before)
    shut_down(iterator)


@pytest.mark.slow
@pytest.mark.slow_cases("SIGINT", "SIGUSR1")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_do_not_end_a_worker_whose_interpreter_ends(name) -> None:
    program = f"""
import os, signal
from modelzoo_trainer.loading.workers import BoundWorker

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{name}):
        kill(pid, number)  # when Python's handlers are gone

late = Late()
BoundWorker(None, has_server=True)(0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@linux
@pytest.mark.slow
def test_the_fork_server_outlives_the_signals_of_a_group(tmp_path) -> None:
    program = """
import multiprocessing, multiprocessing.forkserver, os, signal, time
from torch.utils.data import DataLoader
from modelzoo_trainer.loading.workers import shut_down, start_iterator

def tell_and_sleep(writer):
    writer.send("it runs")
    time.sleep(300)

if __name__ == "__main__":
    iterator = start_iterator(
        DataLoader(range(40), num_workers=2, multiprocessing_context="forkserver")
    )
    assert next(iterator) == 0
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, getattr(signal, name))
    time.sleep(0.5)
    assert len(list(iterator)) == 39
    shut_down(iterator)
    # A process of somebody else's ends by SIGTERM as ever.
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe()
    other = context.Process(target=tell_and_sleep, args=(writer,))
    other.start()
    reader.recv()
    other.terminate()
    other.join(60)
    print(other.exitcode)
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert (ended.stdout, ended.stderr) == (f"{-signal.SIGTERM}\n", "")


class Doubled(DataLoader):
    """A loader of a user's own."""

    def __iter__(self):
        given = super().__iter__()
        self.hidden = weakref.ref(given)
        for batch in given:
            yield 2 * batch


def test_a_loader_may_start_its_workers_later() -> None:
    iterator = start_iterator(Doubled(range(4), num_workers=1))
    assert [batch.item() for batch in iterator] == [0, 2, 4, 6]
    shut_down(iterator)


def test_what_has_no_workers_is_iterated_as_it_is() -> None:
    assert list(start_iterator([1, 2])) == [1, 2]
    assert [batch.item() for batch in start_iterator(DataLoader([1, 2]))] == [1, 2]
    shut_down(iter([1]))


def test_a_worker_is_bound_to_the_process_that_made_the_binding() -> None:
    assert BoundWorker(None, has_server=False).parent == os.getpid()
    assert BoundWorker(None, has_server=True).parent is None
