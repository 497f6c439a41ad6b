"""Stop a process whose launcher, torchrun, has been killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from .liveness import environment_of, identity_of, parent_of

_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
_OF_A_RANK: Final = (_RUN_ID, "TORCHELASTIC_RESTART_COUNT", "RANK")
_LOOK_S: Final = 1.0
_STOP_S: Final = 6.0
_STANDARD_ERROR: Final = 2
_STOPPED: Final = 143
_WATCHES: Final[list[threading.Thread]] = []
_IS_ORPHAN: Final = threading.Event()


def watch_launcher() -> None:
    """Stop this process when torchrun, its launcher, no longer exists. Idempotent.

    Stops as on SIGTERM, with a checkpoint if a step ends soon, and exits at most 6 s later,
    whatever the main thread waits for. Without torchrun's environment variables nothing is watched:
    another parent may end before this process.
    """
    if _WATCHES or not os.environ.get(_RUN_ID):
        return
    is_gone = _launcher()
    if is_gone is not None:
        _WATCHES.append(threading.Thread(target=_watch, args=[is_gone], name="orphan", daemon=True))
        _WATCHES[0].start()


def is_orphan() -> bool:
    """Return whether torchrun was found to be gone."""
    return _IS_ORPHAN.is_set()


def _launcher() -> Callable[[], bool] | None:
    """Return a function that tells whether torchrun is gone; None if that is unknown.

    A program started by torchrun may have started this process: then torchrun's child has this
    rank in its environment, and torchrun itself has not.
    """
    own = [os.environ.get(name) for name in _OF_A_RANK]
    parent: int | None = os.getppid()
    while parent:
        environment = environment_of(parent)
        if [environment.get(name) for name in _OF_A_RANK] != own:
            break
        parent = parent_of(parent)
    if not parent:  # torchrun is outside of this container
        return None
    identity = identity_of(parent)
    if identity.is_here():
        return identity.is_gone
    return lambda: os.getppid() != parent  # systems without /proc


def _watch(is_gone: Callable[[], bool]) -> None:
    while not is_gone():
        time.sleep(_LOOK_S)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            os.write(_STANDARD_ERROR, b"torchrun is gone (it was killed): stopping the run.\n")
    else:
        time.sleep(_LOOK_S)  # wait for rank 0 to report it
    _IS_ORPHAN.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(_STOPPED)
