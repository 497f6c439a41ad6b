"""Processes that load data end with the process that started them, and leave signals to it."""

from __future__ import annotations

import copy
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, MethodType
from typing import Any, Final

import torch.multiprocessing
from torch.utils.data import get_worker_info

from modelzoo_trainer.data.per_sample import SeededDataset
from modelzoo_trainer.data.worker_failures import REPORTS

_PR_SET_PDEATHSIG: Final = 1
_LEFT_TO_THE_PARENT: Final = ("SIGINT", "SIGTERM", "SIGUSR1")
_SETTINGS: Final = ("worker_init_fn", "multiprocessing_context")

WorkerInit = Callable[[int], None]

log = logging.getLogger(__name__)


class BoundWorker:
    """What a worker does first; a `worker_init_fn`.

    It ends when its parent does, in the middle of a sample too: on Linux by the kernel, else by a
    thread that waits for that. The parent may have ended before: that is looked for.

    Signals that a whole group of processes gets (Ctrl-C, a scheduler's) do not end it: the parent
    decides what they mean, and still needs its data for that.

    Args:
        init: The user's own `worker_init_fn`, called last.
        has_server: Whether another process than this one starts the workers (`forkserver`).
    """

    def __init__(self, init: WorkerInit | None, *, has_server: bool) -> None:
        self.init = init
        self.parent = None if has_server else os.getpid()
        # The kernel's signal comes when the starting thread ends, not when its process does.
        self.is_main = threading.current_thread() is threading.main_thread()

    def __call__(self, worker_id: int) -> None:
        """Bind this process; called in the worker."""
        for name in _LEFT_TO_THE_PARENT:
            if hasattr(signal, name):
                # Not SIG_IGN, which the programs that a data set starts would inherit.
                signal.signal(getattr(signal, name), _disregard)
        # The server outlives the parent as long as its workers live.
        if self.is_main and self.parent is not None and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        else:
            threading.Thread(target=_end_with_parent, daemon=True).start()
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the one users know
        if self.init is not None:
            self.init(worker_id)


def start_iterator(loader: Any) -> Iterator[Any]:
    """Return `iter(loader)`, with workers that are bound to this process.

    Workers that were started before an error are ended.

    Args:
        loader: Any iterable; one that starts workers has torch's `num_workers`,
            `worker_init_fn` and `multiprocessing_context`.
    """
    has_settings = all(hasattr(loader, name) for name in _SETTINGS)
    if not getattr(loader, "num_workers", 0) or not has_settings:
        plain: Iterator[Any] = iter(loader)
        return plain
    REPORTS.put_off()
    context = _context_of(loader)
    bound, started = _with_mortal_workers(context)
    given = {name: getattr(loader, name) for name in _SETTINGS}
    has_server = context.get_start_method() == "forkserver"
    loader.worker_init_fn = BoundWorker(loader.worker_init_fn, has_server=has_server)
    loader.multiprocessing_context = bound
    try:
        return WorkerIterator(iter(loader))
    except BaseException:
        _kill(started)
        raise
    finally:
        for name, value in given.items():
            setattr(loader, name, value)


class WorkerIterator(Iterator[Any]):
    """An iterator of a loader with workers.

    Args:
        given: torch's.
    """

    def __init__(self, given: Iterator[Any]) -> None:
        self.given: Any = given
        self.workers: list[Any] = getattr(given, "_workers", [])

    def __next__(self) -> Any:
        with REPORTS.awaited():
            if (error := REPORTS.take(self.workers)) is not None:
                raise error
            return next(self.given)


def shut_down(iterator: Any) -> None:
    """End the workers of an iterator, if it has any; a second call does nothing.

    Without this they end when the iterator is collected, which a traceback may put off.
    """
    if not isinstance(iterator, WorkerIterator) or not iterator.workers:
        return
    given, workers = iterator.given, iterator.workers
    error = REPORTS.take(workers)
    if any(worker.exitcode for worker in workers):
        _kill(workers)
        given._workers_done_event = threading.Event()  # who died may hold the lock of the real one
    try:
        with REPORTS.awaited():  # who dies now may hold it as well
            given._shutdown_workers()
    except RuntimeError as raised:
        error = raised
    if error is not None:
        log.warning("%s (its data was not needed any more)", error)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        if worker.pid is not None:
            worker.kill()
            worker.join()


def _context_of(loader: Any) -> Any:
    return (loader.multiprocessing_context or torch.multiprocessing).get_context()


def _with_mortal_workers(context: Any) -> tuple[Any, list[Any]]:
    """Return a context whose processes end when they are told to, and a list of its processes."""
    started: list[Any] = []

    def process(*arguments: Any, **options: Any) -> Any:
        made = context.Process(*arguments, **options)
        made._Popen = _open_mortal
        started.append(made)
        return made

    bound = copy.copy(context)
    bound.Process = process
    return bound, started


def _open_mortal(process: Any) -> Any:
    """Start a process that `terminate` kills: workers disregard SIGTERM."""
    opened = type(process)._Popen(process)
    if hasattr(opened, "kill"):
        # No cycle: the pipes are closed with the last reference.
        opened.terminate = MethodType(type(opened).kill, weakref.proxy(opened))
    return opened


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _disregard(signum: int, frame: FrameType | None) -> None:
    """Leave a signal to the parent."""
