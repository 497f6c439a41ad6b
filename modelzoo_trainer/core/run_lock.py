"""One run per folder: a lock that dies with its process."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.run_lock")

LOCK_NAME: Final = ".lock"
_IS_HELD: Final = (errno.EACCES, errno.EAGAIN)


class RunLock(CoreCallback):
    """Makes `model_dir`, and refuses it while another process trains or validates in it.

    The lock is the kernel's (`lockf`): it ends with the process however that ends, and workers of
    a dataloader do not inherit it. What the file says is for people alone. Trainers of one process
    share it, but only one of them fits at a time.

    Raises:
        ConfigError: At set-up, if another process holds the folder, or it cannot be made; when a
            fit begins, if another trainer of this process is training in it.
    """

    def __init__(self) -> None:
        self._folder: str | None = None
        self.is_held = False
        """Whether nobody else can be at work in the folder."""

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if not trainer.backend.is_main:
            return
        folder = trainer.model_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = os.path.realpath(folder)
            self.is_held = _acquire(self._folder)
        except OSError as error:
            raise ConfigError(
                f"model_dir {str(folder)!r} cannot be used: {error.strerror or error} "
                f"({error.filename}). Choose a folder that can be written."
            ) from None

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        folder = self._folder
        if folder is None:
            return
        if folder in _FITTING:
            raise ConfigError(
                f"model_dir {folder!r} is being trained in by another trainer of this process. "
                f"Give each its own."
            )
        _FITTING.add(folder)
        stack.callback(_FITTING.discard, folder)

    @override
    def finalize(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None and self.is_held:
            self.is_held = False
            _release(folder)


class _Held:
    """The lock on one folder, shared by the trainers of a process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pid = os.getpid()
        self.count = 1


_FITTING: Final[set[str]] = set()
# Closing any descriptor of a locked file drops the process's lock, so each is opened once.
_HELD: Final[dict[str, _Held]] = {}


def _acquire(folder: str) -> bool:
    """Lock a folder for this process; return False where the file system knows no locks.

    Raises:
        ConfigError: If another process has it.
        OSError: If the file cannot be written.
    """
    held = _HELD.get(folder)
    if held is not None and held.pid == os.getpid():
        held.count += 1
        return True
    try:
        import fcntl
    except ImportError:
        log.debug("This system has no lockf: a second run in %s is not noticed.", folder)
        return False
    path = Path(folder, LOCK_NAME)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        if error.errno in _IS_HELD:
            raise ConfigError(
                f"model_dir {folder!r} is in use by {holder}. Wait until that run has ended, or "
                f"give this one another model_dir."
            ) from None
        log.warning("%s cannot be locked (%s): a second run is not noticed.", folder, error)
        return False
    facts = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%F %T")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(facts).encode("ascii"), 0)
    _HELD[folder] = _Held(descriptor)
    return True


def _holder(descriptor: int) -> str:
    with suppress(OSError, ValueError, LookupError, TypeError):
        facts = json.loads(os.pread(descriptor, 1024, 0))
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    return "another process"


def _release(folder: str) -> None:
    held = _HELD[folder]
    held.count -= 1
    if held.count == 0 and held.pid == os.getpid():
        del _HELD[folder]
        os.close(held.descriptor)
