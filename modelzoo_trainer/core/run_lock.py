"""One run per folder: a lock that dies with its process."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.regular_files import require_regular

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.run_lock")

LOCK_NAME: Final = ".lock"
ORPHANS_S: Final = 10.0
"""How long children of a process that was killed may keep its lock."""
_POLL_S: Final = 0.1
_IS_HELD: Final = (errno.EACCES, errno.EAGAIN)


class RunLock(CoreCallback):
    """Makes `model_dir`, and refuses it while another process trains or validates in it.

    Trainers of one process share it, but only one of them fits at a time. See `FolderLock`.

    Raises:
        ConfigError: At set-up, if another process holds the folder, or it cannot be made; when a
            fit begins, if another trainer of this process is training in it; when a checkpoint is
            saved, if another process has locked the folder since the lock file was removed.
    """

    def __init__(self) -> None:
        self._lock = FolderLock("model_dir")

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if trainer.backend.comm.is_main:
            self._lock.take(trainer.model_dir)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._lock.begin_fit(stack)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._lock.check()

    @override
    def finalize(self) -> None:
        self._lock.release()


class FolderLock:
    """Keeps other processes out of a folder.

    The lock is the kernel's (`flock`): it ends with the process however that ends, and children
    that Python forks do not keep it. What the file says is for people, and tells a holder that
    has died: what other children it has get 10 s to follow it.

    On a network file system it keeps out other hosts where the mount passes locks to the server:
    NFS does unless it is mounted with `nolock` or `local_lock`, Lustre if it is mounted with
    `flock`. Elsewhere it holds among the processes of one host; where there are no locks at all
    that is logged.

    Args:
        setting: What the folder is called where it is set.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._folder: str | None = None
        self._pid = 0
        self.is_held = False
        """Whether nobody else can be at work in the folder."""

    def take(self, folder: Path) -> None:
        """Make a folder and lock it.

        Raises:
            ConfigError: If another process holds it, or it cannot be made or written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder, self._pid = os.path.realpath(folder), os.getpid()
            self.is_held = _acquire(self._folder, self._setting)
        except OSError as error:
            raise ConfigError(
                f"{self._setting} {str(folder)!r} cannot be used: {error.strerror or error} "
                f"({error.filename}). Choose a folder that can be written."
            ) from None

    def check(self) -> None:
        """Check that the lock file in the folder is still the one that this process has locked.

        If it was removed or replaced, and the new one is free, it is locked again with a warning.
        A folder that the disk refuses is left to whoever writes there next.

        Raises:
            ConfigError: If another process holds it.
        """
        if self._folder is None or not self.is_held or self._pid != os.getpid():
            return
        try:
            is_renewed = _renew(self._folder, self._setting)
        except ConfigError as error:
            raise ConfigError(
                f"the lock file {LOCK_NAME} was removed or replaced during this run, and {error}"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked again: %s", self._folder, error)
            return
        if is_renewed:
            log.warning(
                "The lock file of %s %r was removed or replaced during the run; it is locked "
                "again. Files of this run may be gone there, among them metrics and logs that are "
                "still written to but have no name, or another run may have written some.",
                self._setting,
                self._folder,
            )

    def begin_fit(self, stack: ExitStack) -> None:
        """Keep other trainers of this process from fitting in the folder.

        This ends with the stack.

        Raises:
            ConfigError: If one does, or if another process has taken the folder.
        """
        self.check()
        folder = self._folder
        if folder is None:
            return
        if folder in _FITTING:
            raise ConfigError(
                f"{self._setting} {folder!r} is being trained in by another trainer of this "
                f"process. Give each its own."
            )
        _FITTING.add(folder)
        stack.callback(_FITTING.discard, folder)

    def release(self) -> None:
        """Let others take the folder; a second call does nothing."""
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
_HELD: Final[dict[str, _Held]] = {}


def _acquire(folder: str, setting: str) -> bool:
    """Lock a folder for this process; return False where the file system knows no locks.

    Raises:
        ConfigError: If another process has it, or something else than a file is there.
        OSError: If the file cannot be written.
    """
    held = _HELD.get(folder)
    if held is not None and held.pid == os.getpid():
        held.count += 1
        return True
    path = Path(folder, LOCK_NAME)
    require_regular(path)
    # Open for reading, it does not keep the disk from becoming read-only.
    descriptor = _open(path, os.O_RDONLY)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            _flock(descriptor, path)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _IS_HELD:
                raise ConfigError(
                    f"{setting} {folder!r} is in use by {_holder(descriptor)}. Wait until that run "
                    f"has ended, or give this one another {setting}."
                ) from None
            log.warning("%s cannot be locked (%s): a second run is not noticed.", folder, error)
            return False
        _note_holder(path)
        stack.pop_all()
    _close_in_children()
    _HELD[folder] = _Held(descriptor)
    return True


def _renew(folder: str, setting: str) -> bool:
    """Lock a folder again if its lock file is no longer the locked one; return whether it was so.

    Raises:
        ConfigError: If another process has it.
        OSError: If the file cannot be looked at or written.
    """
    held = _HELD.get(folder)
    if held is not None:
        if _is_at(held.descriptor, Path(folder, LOCK_NAME)):
            return False
        os.close(held.descriptor)  # it locks a file that nobody finds
        del _HELD[folder]
    Path(folder).mkdir(parents=True, exist_ok=True)
    _acquire(folder, setting)
    if held is not None and folder in _HELD:
        _HELD[folder].count = held.count
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open(path: Path, access: int) -> int:
    return os.open(path, access | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _note_holder(path: Path) -> None:
    facts = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%F %T")}
    with open(_open(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(json.dumps(facts).encode("ascii"))


def _flock(descriptor: int, path: Path) -> None:
    """Lock an open file; open it for writing where only such files can be locked (NFS)."""
    try:
        _wait_for(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        writable = _open(path, os.O_RDWR)
        os.dup2(writable, descriptor, inheritable=False)
        os.close(writable)
        _wait_for(descriptor)


def _wait_for(descriptor: int) -> None:
    """Lock an open file; wait for a while if whoever noted itself in it is dead."""
    import fcntl

    deadline = time.monotonic() + ORPHANS_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in _IS_HELD
            if not is_held or time.monotonic() > deadline or not _holder_is_dead(descriptor):
                raise
        else:
            return
        time.sleep(_POLL_S)


def _holder_is_dead(descriptor: int) -> bool:
    with suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
        facts = json.loads(os.pread(descriptor, 1024, 0))
        if facts["host"] != platform.node():
            return False
        try:
            os.kill(facts["pid"], 0)
        except ProcessLookupError:
            return True
        return bool(facts["pid"] == os.getpid())  # of an earlier process with this number
    return False


def _holder(descriptor: int) -> str:
    with suppress(OSError, ValueError, LookupError, TypeError):
        facts = json.loads(os.pread(descriptor, 1024, 0))
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    return "another process"


def _release(folder: str) -> None:
    held = _HELD.get(folder)
    if held is None or held.pid != os.getpid():  # in a child
        return
    held.count -= 1
    if held.count == 0:
        import fcntl

        del _HELD[folder]
        fcntl.flock(held.descriptor, fcntl.LOCK_UN)  # else a child may keep it
        os.close(held.descriptor)


@cache
def _close_in_children() -> None:
    """Have children that are forked from now on let go of the locks."""
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for held in _HELD.values():
        os.close(held.descriptor)
    _HELD.clear()
