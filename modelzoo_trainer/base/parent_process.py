"""End a process with the one that started it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process once its parent has ended, also by SIGKILL.

    A no-op if multiprocessing has not started this process. The parent is the process that called
    `start`, not a server that has forked this one.
    """
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # checked above
    parent.join()
    os._exit(1)
