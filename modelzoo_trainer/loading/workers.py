"""Worker processes: how they start, fail, and end with the process that started them."""

from __future__ import annotations

import atexit
import copy
import ctypes
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import connection
from types import FrameType, MethodType
from typing import Any, Final

import torch.multiprocessing
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling as torch_signals
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from modelzoo_trainer.base.exit_codes import STOP_SIGNALS
from modelzoo_trainer.base.parent_process import end_with_parent
from modelzoo_trainer.errors import ConfigError, not_an_end
from modelzoo_trainer.loading.batch_seeds import DatasetWrapper
from modelzoo_trainer.loading.fetchers import check_all_here, checked
from modelzoo_trainer.loading.shared_memory import note_shared_memory


class _Reports:
    """torch's SIGCHLD handler; its exceptions are kept until the process waits for data.

    A context manager for code that waits for data.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.kept: list[RuntimeError] = []
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD."""
        if self._handler is None:
            return
        try:
            self._handler(signum, frame)
        except RuntimeError as error:
            if self.num_waiting:
                raise
            self.kept.append(error.with_traceback(None))

    def replace_torchs(self) -> None:
        """Replace torch's handler. Only the main thread can."""
        if not _is_main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        torch_signals._set_SIGCHLD_handler()
        current = signal.getsignal(signal.SIGCHLD)
        if getattr(current, "__module__", None) == torch_signals.__name__ and callable(current):
            self._handler = current
            signal.signal(signal.SIGCHLD, self)

    def __enter__(self) -> None:
        """Let the handler raise."""
        self.num_waiting += _is_main_thread()  # handlers run in the main thread

    def __exit__(self, *exc_info: object) -> None:
        """Keep exceptions of the handler again."""
        self.num_waiting -= _is_main_thread()

    def forget(self, workers: Iterable[Any]) -> str | None:
        """Drop the exception kept for some workers, and return its text."""
        names = [f"(pid {worker.pid})" for worker in workers]  # as in torch's messages
        told = [error for error in self.kept if any(name in str(error) for name in names)]
        self.kept = [error for error in self.kept if error not in told]
        return str(told[0]) if told else None


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


REPORTS: Final = _Reports()


_PR_SET_PDEATHSIG: Final = 1
_KILL_S: Final = 5.0  # to wait after SIGKILL before giving up on a process
_DEATH_S: Final = 1.0  # to wait after a connection to a worker broke, whether it has died
_SETTINGS: Final = ("worker_init_fn", "multiprocessing_context")

WorkerInit = Callable[[int], None]

log = logging.getLogger("modelzoo_trainer.data.worker_life")


class BoundWorker:
    """A `worker_init_fn` that binds a worker to its parent.

    The worker ends when its parent does, even in the middle of a sample: through the kernel on
    Linux, else through a waiting thread. It also checks whether the parent has already ended.

    Signals sent to the process group (Ctrl-C, a scheduler's) do not end it: the parent decides what
    they mean, and still needs the data for that.

    Args:
        init: The user's `worker_init_fn`, called last.
        has_server: Whether another process starts the workers (`forkserver`).
    """

    def __init__(self, init: WorkerInit | None, *, has_server: bool) -> None:
        self.init = init
        self.parent = None if has_server else os.getpid()
        # The kernel's signal comes when the starting thread ends, not when its process does.
        self.is_main = threading.current_thread() is threading.main_thread()

    def __call__(self, worker_id: int) -> None:
        """Bind this process; called in the worker."""
        for number in STOP_SIGNALS:
            # Not SIG_IGN, which subprocesses started by a dataset would inherit.
            signal.signal(number, _ignore_signal)
        atexit.register(_ignore)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # The server outlives the parent as long as its workers live.
        if self.is_main and self.parent is not None and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        else:
            end_with_parent()
        if self.parent is not None and os.getppid() != self.parent:
            os._exit(1)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, DatasetWrapper):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's dataset
        check_all_here()
        if self.init is not None:
            try:
                self.init(worker_id)
            except StopIteration as error:
                raise not_an_end(error, "worker_init_fn") from error


def start_iterator(loader: Any) -> WorkerIterator:
    """Return `iter(loader)`, with workers that are bound to this process.

    A StopIteration of user code that does not end an iterator is raised as a RuntimeError.

    Workers started before an error are shut down.

    Args:
        loader: Any iterable; if it starts workers, it has torch's `num_workers`,
            `worker_init_fn` and `multiprocessing_context`.
    """
    preparing = _preparing(loader)
    if preparing is None:
        return WorkerIterator(_waiting(_iterated, loader))
    if preparing is _binding:
        REPORTS.replace_torchs()
    with preparing(loader):
        given = _waiting(_iterated, loader)
    workers = getattr(given, "_workers", [])
    is_started = workers or type(given) is _SingleProcessDataLoaderIter
    return WorkerIterator(given, workers, starts_later=None if is_started else loader)


def _preparing(loader: Any) -> Callable[[Any], AbstractContextManager[None]] | None:
    """Return the context in which a loader's iterators are created; None = any."""
    if getattr(loader, "num_workers", 0) and all(hasattr(loader, n) for n in _SETTINGS):
        return _binding
    return checked if isinstance(loader, DataLoader) else None


def _iterated(loader: Any) -> Iterator[Any]:
    try:
        return iter(loader)
    except StopIteration as error:
        raise not_an_end(error, f"__iter__ of {type(loader).__name__}") from error


class WorkerIterator(Iterator[Any]):
    """An iterator over a loader that may have workers.

    Args:
        given: The loader's iterator.
        workers: Its processes, if bound to this one.
        starts_later: The loader, if it creates torch's iterator at the first batch.
    """

    def __init__(
        self, given: Iterator[Any], workers: Sequence[Any] = (), *, starts_later: Any = None
    ) -> None:
        self.given: Any = given
        self.workers = workers
        self._starts_later = starts_later

    def next_function(self) -> Callable[[], Any]:
        """Return the function behind `next`; torch's own without workers, as nothing waits."""
        is_torchs = type(self.given) is _SingleProcessDataLoaderIter
        return self.given.__next__ if is_torchs else self.__next__

    def __next__(self) -> Any:
        if self._starts_later is None:
            return _waiting(self._next if self.workers else next, self.given)
        loader, self._starts_later = self._starts_later, None
        with (_preparing(loader) or nullcontext)(loader):
            return _waiting(next, self.given)

    def _next(self, given: Iterator[Any]) -> Any:
        try:
            return next(given)
        except StopIteration as error:
            if error.args:  # raised again for a worker or the thread that pins memory
                raise not_an_end(error, "code that loads batches") from error
            raise
        except ConfigError as error:  # its message has the traceback of the worker
            raise ConfigError(_own_message(error)) from error
        except (OSError, EOFError) as error:
            # Perhaps from a worker that died while its last batch was received. torch's handler
            # of SIGCHLD, which may run within the wait, says so itself.
            if not (ended := self._ended_workers()):
                raise
            raise RuntimeError(
                f"DataLoader worker (pid {ended[0].pid}) ended with exit code "
                f"{ended[0].exitcode} while its last batch was received"
            ) from error

    def _ended_workers(self) -> list[Any]:
        by_sentinel = {worker.sentinel: worker for worker in self.workers}
        for sentinel in connection.wait(by_sentinel, _DEATH_S):
            by_sentinel[sentinel].join(_DEATH_S)  # its exit code comes after its sentinel
        return [worker for worker in self.workers if worker.exitcode is not None]


def _waiting(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function that waits for data; raise if a worker has died or dies now."""
    reports, is_main = REPORTS, _is_main_thread()
    reports.num_waiting += is_main
    try:
        if reports.kept:
            raise reports.kept.pop(0)
        return function(argument)
    except (OSError, RuntimeError) as error:
        note_shared_memory(error)
        raise
    finally:
        reports.num_waiting -= is_main


def _own_message(error: ConfigError) -> str:
    """Return the message that an error had in the worker, without torch's additions."""
    text = str(error)
    head, found, message = text.rpartition(f"{ConfigError.__module__}.ConfigError: ")
    return message.rstrip() if found and head.startswith("Caught ConfigError in") else text


def shut_down(iterator: Any) -> None:
    """Shut down the workers of an iterator, if it has any. Idempotent.

    Otherwise they end when the iterator is collected, which a traceback may delay.
    """
    if not isinstance(iterator, WorkerIterator) or not iterator.workers:
        return
    given, workers = iterator.given, iterator.workers
    said = REPORTS.forget(workers)
    if any(worker.exitcode for worker in workers):
        _kill(workers)
        _skip_waits_of_dead_workers(given)
    try:
        with REPORTS:  # a worker that dies now may hold a lock
            given._shutdown_workers()
    except RuntimeError as error:
        said = str(error)
    if said is not None:
        log.warning(
            "Ignored an error in a data loader worker whose batches were no longer needed: %s", said
        )


def _skip_waits_of_dead_workers(iterator: Any) -> None:
    """Keep torch's iterator from waiting for a lock or for the rest of a batch."""
    iterator._workers_done_event = threading.Event()  # the original's lock may be held
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()
        del iterator._pin_memory_thread  # a daemon that may be reading half a batch


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.pid is not None:
            worker.kill()
    for worker in workers:
        if worker.pid is not None:
            worker.join(_KILL_S)
    REPORTS.forget(workers)


@contextmanager
def _binding(loader: Any) -> Iterator[None]:
    """Bind the workers that a loader starts to this process."""
    context = _context_of(loader)
    has_server = context.get_start_method() == "forkserver"
    if has_server:
        # Not available on every system.
        from modelzoo_trainer.loading.fork_server import start_sturdy_server

        start_sturdy_server()
    mortal, started, events = _with_killable_workers(context)
    given = {name: getattr(loader, name) for name in _SETTINGS}
    loader.worker_init_fn = BoundWorker(loader.worker_init_fn, has_server=has_server)
    loader.multiprocessing_context = mortal
    try:
        yield
    except BaseException:
        _kill(started)
        for event in events:  # a killed worker may hold its lock and block torch
            own = threading.Event()
            event.set, event.is_set = own.set, own.is_set
        raise
    finally:
        for name, value in given.items():
            setattr(loader, name, value)


def _context_of(loader: Any) -> Any:
    return (loader.multiprocessing_context or torch.multiprocessing).get_context()


def _with_killable_workers(context: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return a context whose processes end on SIGTERM, and lists of its processes and events."""
    started: list[Any] = []
    events: list[Any] = []

    def process(*arguments: Any, **options: Any) -> Any:
        made = context.Process(*arguments, **options)
        made._Popen = _open_killable
        started.append(made)
        return made

    def event() -> Any:
        events.append(context.Event())
        return events[-1]

    bound = copy.copy(context)
    bound.Process, bound.Event = process, event
    return bound, started, events


def _open_killable(process: Any) -> Any:
    """Start a process that `terminate` kills: workers ignore SIGTERM."""
    with _signals_blocked():
        opened = type(process)._Popen(process)
    if hasattr(opened, "kill"):
        # No cycle: the pipes are closed with the last reference.
        opened.terminate = MethodType(type(opened).kill, weakref.proxy(opened))
    return opened


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals, also in processes started here, until these ignore them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore() -> None:
    """Ignore signals until the process ends: an interpreter at shutdown drops handlers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _ignore_signal(signum: int, frame: FrameType | None) -> None:
    """Leave a signal to the parent."""
