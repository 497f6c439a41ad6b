"""Processes that load data end with the process that started them, and leave signals to it."""

from __future__ import annotations

import ctypes
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

_PR_SET_PDEATHSIG: Final = 1
_LEFT_TO_THE_PARENT: Final = ("SIGINT", "SIGTERM", "SIGUSR1")

WorkerInit = Callable[[int], None]


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

    Args:
        loader: Any iterable; one that starts workers has torch's `num_workers` and
            `worker_init_fn`.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        plain: Iterator[Any] = iter(loader)
        return plain
    init = loader.worker_init_fn
    loader.worker_init_fn = BoundWorker(init, has_server=_start_method(loader) == "forkserver")
    try:
        iterator: Iterator[Any] = iter(loader)
    finally:
        loader.worker_init_fn = init
    for worker in getattr(iterator, "_workers", ()):
        process: Any = getattr(worker, "_popen", None)
        if hasattr(process, "kill"):  # SIGTERM would be disregarded
            # No cycle: the pipes are closed with the last reference.
            process.terminate = MethodType(type(process).kill, weakref.proxy(process))
    return iterator


def shut_down(iterator: Any) -> None:
    """End the workers of a torch iterator, if it has any; a second call does nothing.

    Without this they end when the iterator is collected, which a traceback may put off.
    """
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _start_method(loader: Any) -> str | None:
    context = getattr(loader, "multiprocessing_context", None) or torch.multiprocessing
    method: str | None = context.get_start_method()
    return method


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _disregard(signum: int, frame: FrameType | None) -> None:
    """Leave a signal to the parent."""
