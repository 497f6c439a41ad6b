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

from modelzoo_trainer.base.regular_files import require_regular
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.errors import ConfigError, unusable

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.run_lock")

LOCK_NAME: Final = ".lock"
ORPHANS_S: Final = 10.0
"""How long to wait for children of a killed process to release its lock."""
_POLL_S: Final = 0.1
_IS_HELD: Final = (errno.EACCES, errno.EAGAIN)


class RunLock(CoreCallback):
    """Create `model_dir`, and lock it against other processes.

    Trainers of one process share it, but only one of them may fit at a time. See `FolderLock`.

    Raises:
        ConfigError: At set-up, if another process holds the lock, or the folder cannot be created;
            at the start of a fit, if another trainer of this process is training in it; when a
            checkpoint is saved, if the lock file was removed and another process took the lock.
    """

    def __init__(self) -> None:
        self._lock = FolderLock("model_dir")
        self.has_created = False
        """Whether this object created `model_dir`."""

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if trainer.backend.comm.is_main:
            self.has_created = not os.path.exists(trainer.model_dir)
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
    """Lock a folder against other processes.

    The kernel's lock (`flock`) ends with the process in any case, and children forked by Python do
    not keep it. The content of the file names the holder; if that has died, its other children get
    10 s to exit.

    On a network file system the lock applies across hosts if the mount passes locks to the server:
    NFS unless mounted with `nolock` or `local_lock`, Lustre if mounted with `flock`. Otherwise it
    applies to the processes of one host; a file system without locks is logged.

    Args:
        setting: The name of the folder's setting, for messages.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._given = Path()
        self._folder: str | None = None
        self._left: list[str] = []
        """Folders to which the path led earlier in the run; locked as well."""
        self._pid = 0
        self.is_held = False
        """Whether the lock is held."""

    def take(self, folder: Path) -> None:
        """Create and lock a folder.

        Raises:
            ConfigError: If another process holds the lock, or the folder is not writable.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._given = folder
            self._folder, self._pid = os.path.realpath(folder), os.getpid()
            self.is_held = _acquire(self._folder, self._setting)
        except OSError as error:
            raise unusable(self._setting, folder, error) from None

    def check(self) -> None:
        """Check that this process still holds the lock.

        If the lock file was removed or replaced, lock it again if possible, with a warning. If the
        path leads to another folder, because a link in it was changed, lock that one, too, with a
        warning. Disk errors are logged.

        Raises:
            ConfigError: If another process holds the lock.
        """
        if self._folder is None or not self.is_held or self._pid != os.getpid():
            return
        if os.path.realpath(self._given) != self._folder:
            self._follow(self._folder)
        try:
            is_renewed = _renew(self._folder, self._setting)
        except ConfigError as error:
            raise ConfigError(
                f"the lock file {LOCK_NAME} was removed or replaced during this run, and {error}"
            ) from None
        except OSError as error:
            log.warning(
                "The lock of %s cannot be renewed (%s): a second run in this folder would not be "
                "detected. Do not start one.",
                self._folder,
                error,
            )
            return
        if is_renewed:
            log.warning(
                "The lock file of %s %r was removed or replaced during the run; the folder is "
                "locked again. If other files were removed too, metrics and logs may be missing. "
                "Another run may have written to the folder.",
                self._setting,
                self._folder,
            )

    def _follow(self, before: str) -> None:
        """Lock the folder to which the path leads now."""
        try:
            self._given.mkdir(parents=True, exist_ok=True)
            now = os.path.realpath(self._given)
            self.is_held = _acquire(now, self._setting)
        except ConfigError as error:
            raise ConfigError(
                f"{self._setting} {str(self._given)!r} leads to another folder than when the run "
                f"started ({before!r}), and {error}"
            ) from None
        except OSError as error:
            log.warning("The lock of %s cannot be taken: %s", self._given, error)
            return
        self._left.append(before)
        self._folder = now
        log.warning(
            "%s %r leads to another folder than when the run started: then %r, now %r. New "
            "checkpoints will be in the new one; earlier ones, metrics and logs are in the old "
            "one. Do not change links in the path during a run.",
            self._setting,
            str(self._given),
            before,
            now,
        )

    def begin_fit(self, stack: ExitStack) -> None:
        """Lock the folder against other fits of this process, until the stack closes.

        Raises:
            ConfigError: If another fit is running, or another process holds the lock.
        """
        self.check()
        folder = self._folder
        if folder is None:
            return
        if folder in _FITTING:
            raise ConfigError(
                f"{self._setting} {folder!r} is in use by the fit of another trainer in this "
                f"process. Use a different folder for each trainer."
            )
        _FITTING.add(folder)
        stack.callback(_FITTING.discard, folder)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None and self.is_held:
            self.is_held = False
            for one in (*self._left, folder):
                _release(one)
            self._left = []


class _Held:
    """The lock on one folder, shared by the trainers of a process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pid = os.getpid()
        self.count = 1


_FITTING: Final[set[str]] = set()
_HELD: Final[dict[str, _Held]] = {}


def _acquire(folder: str, setting: str) -> bool:
    """Lock a folder for this process; return False if the file system has no locks.

    Raises:
        ConfigError: If another process holds the lock, or the path is not a file.
        OSError: If the file cannot be written.
    """
    held = _HELD.get(folder)
    if held is not None and held.pid == os.getpid():
        held.count += 1
        return True
    path = Path(folder, LOCK_NAME)
    require_regular(path)
    # Read-only: does not prevent a read-only remount.
    descriptor = _open(path, os.O_RDONLY)
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            _flock(descriptor, path)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _IS_HELD:
                raise ConfigError(
                    f"{setting} {folder!r} is in use by {_holder(descriptor)}. Wait until that run "
                    f"has ended, or use another {setting}."
                ) from None
            log.warning(
                "Could not lock %s (%s): a second run in this folder would not be detected. Do "
                "not start one.",
                folder,
                error,
            )
            return False
        _note_holder(path)
        stack.pop_all()
    _close_in_children()
    _HELD[folder] = _Held(descriptor)
    return True


def _renew(folder: str, setting: str) -> bool:
    """Lock a folder again if its lock file was replaced; return whether it was.

    Raises:
        ConfigError: If another process holds the lock.
        OSError: If the file cannot be read or written.
    """
    held = _HELD.get(folder)
    if held is not None:
        if _is_at(held.descriptor, Path(folder, LOCK_NAME)):
            return False
        os.close(held.descriptor)  # locks a removed file
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
    """Lock an open file; open it for writing if that is required (NFS)."""
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
    """Lock an open file; wait for a while if its recorded holder is dead."""
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
        return bool(facts["pid"] == os.getpid())  # an earlier process with this pid
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
        fcntl.flock(held.descriptor, fcntl.LOCK_UN)  # a child may keep it otherwise
        os.close(held.descriptor)


@cache
def _close_in_children() -> None:
    """Release locks in children forked from now on."""
    os.register_at_fork(after_in_child=_release_in_child)


def _release_in_child() -> None:
    for held in _HELD.values():
        os.close(held.descriptor)
    _HELD.clear()
