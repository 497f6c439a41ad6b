"""The thread that uploads what is new in a mirror, while training continues."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable
from typing import Final

from modelzoo_trainer.checkpointing.stores.cache import bound
from modelzoo_trainer.checkpointing.stores.mirror import Mirror
from modelzoo_trainer.checkpointing.stores.pushing import Pending, Progress, Pusher
from modelzoo_trainer.errors import ConfigError, StoreError

log = logging.getLogger("modelzoo_trainer.stores")

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0
_LAST_PAUSE_S: Final = 5.0  # while the end of the run waits
_MAX_NAMES: Final = 10
_REPORT_S: Final = 30.0
_POLL_S: Final = 0.2


class Uploader:
    """Uploads checkpoints, metrics and logs in the background until it is stopped.

    A failure is logged once for as long as it lasts; the upload is tried again, more and more
    rarely, and when something new is to be uploaded.

    Args:
        mirror: What to upload.
        sync_s: Time between two uploads of metrics and logs.
        cache_bytes: The most that local copies of uploaded checkpoints may take.
        check: Raises a `ConfigError` if this run may no longer change the store.
    """

    def __init__(
        self, mirror: Mirror, *, sync_s: float, cache_bytes: int | None, check: Callable[[], None]
    ) -> None:
        self.mirror = mirror
        self._sync_s = sync_s
        self._cache_bytes = cache_bytes
        self._pusher = Pusher(mirror, check)
        self._is_asked = threading.Event()
        self._is_stopped = threading.Event()
        self._is_finishing = False
        self._is_complete = threading.Event()
        self._lock = threading.Lock()  # held during a round
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._is_lost = False
        self._has_swept = False
        self._moves, self._moved_s, self._said_s = 0, 0.0, 0.0

    @property
    def failure(self) -> str | None:
        """Why the last round failed; None = it did not."""
        return self._failure

    @property
    def pending(self) -> Pending:
        """What is not in the store."""
        return self._pusher.pending()

    @property
    def pending_bytes(self) -> int:
        """The size of what is not in the store, checkpoints excluded."""
        paths = [self.mirror.path / name for name in self.pending.files]
        return sum(path.stat().st_size for path in paths if path.exists())

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._is_stopped.clear()
            self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Have new checkpoints and deletions sent now; returns at once."""
        self._is_asked.set()

    def stop(self) -> None:
        """End the thread after the round that is running, without waiting for it."""
        self._is_stopped.set()
        self._is_asked.set()

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            self._is_asked.wait(self._sync_s if self._failure is None else pause_s)
            if self._failure is not None and self._is_asked.is_set():
                self._is_stopped.wait(_FIRST_PAUSE_S)  # many may ask at a time
            if self._is_stopped.is_set():
                return
            self._is_asked.clear()
            is_finishing = self._is_finishing
            if self.round(all_files=is_finishing):
                pause_s = 0.0
                if is_finishing and not self._is_asked.is_set():
                    self._is_complete.set()
            else:
                longest = _LAST_PAUSE_S if is_finishing else _MAX_PAUSE_S
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), longest)

    def round(self, *, all_files: bool = True) -> bool:
        """Upload what is new; return whether all of it is in the store now. Logs failures."""
        with self._lock:
            try:
                self._pusher.push(all_files=all_files)
                bound(self.mirror, self._pusher.record, self._cache_bytes)
                if not self._has_swept:
                    self._pusher.sweep()
                self._has_swept = True
            except ConfigError as error:  # another run has taken the lock
                self._is_lost = True
                self._note_failure(str(error))
                return False
            except (StoreError, OSError) as error:
                self._note_failure(str(error))
                return False
            except Exception as error:  # noqa: BLE001  # the thread must not end silently
                self._note_failure(f"{type(error).__name__}: {error}")
                return False
        if self._failure is not None:
            log.info("Uploads to %s work again.", self.mirror.url)
        self._failure = None
        return True

    def upload(self, name: str) -> str | None:
        """Upload a checkpoint now, unless it is in the store; return why it cannot be, or None.

        Raises:
            StoreError: If the store refuses something, or does not answer.
            OSError: If the mirror cannot be read or written.
            ConfigError: If another run has taken the lock.
        """
        with self._lock:
            return self._pusher.push_one(name)

    def _note_failure(self, why: str) -> None:
        if self._failure != why:
            log.error(
                "UPLOADS FAIL: %s. %sCheckpoints are kept in %s, and uploads are tried again.",
                why.removesuffix("."),
                "" if self._is_finishing else "Training continues. ",
                self.mirror.path,
            )
        self._failure = why

    def finish(self, patience_s: float) -> str | None:
        """Wait until everything is in the store; return what is not, and why.

        `patience_s`: how long it may take without any progress.
        """
        self.begin_to_finish()
        while not self.is_over(patience_s, _REPORT_S):
            pass
        return self.end_of_finish()

    def begin_to_finish(self) -> None:
        """Upload everything from now on, metrics and logs, too."""
        self._is_complete.clear()
        self._is_finishing = True
        self._moves, self._moved_s = self._pusher.progress.moves, time.monotonic()
        self._said_s = self._moved_s
        self.start()
        self.ask()

    def is_over(self, patience_s: float, wait_s: float) -> bool:
        """Wait for a while; return whether everything is in the store, or there is no hope."""
        progress, end_s = self._pusher.progress, time.monotonic() + wait_s
        while not self._is_complete.wait(_POLL_S):
            now = time.monotonic()
            if progress.moves != self._moves:
                self._moves, self._moved_s = progress.moves, now
            if self._is_lost or now - self._moved_s > patience_s:
                return True
            if now - self._said_s > _REPORT_S:
                self._said_s = now
                log.info("Waiting for uploads to %s: %s.", self.mirror.url, self._state(progress))
            if now > end_s:
                return False
        return True

    def end_of_finish(self) -> str | None:
        """Return what is not in the store, and why; None = nothing.

        Logs that have grown since then do not count: uploads write messages themselves.
        """
        self._is_finishing = False
        is_done = self._is_complete.is_set() and not self._pusher.refused
        return None if is_done else self.report()

    def _state(self, progress: Progress) -> str:
        if progress.name:
            return (
                f"{progress.name}, {progress.num_sent / 1e6:.0f} of {progress.num_bytes / 1e6:.0f} "
                f"MB sent"
            )
        return self._failure or "metrics and logs"

    def report(self) -> str | None:
        """Return what is only in the mirror, why, and how to upload it; None = nothing."""
        pending, refused = self.pending, self._pusher.refused
        parts = []
        names = [*refused, *pending.checkpoints]
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            parts.append(f"the checkpoints {', '.join(names[:_MAX_NAMES])}{more}")
        if pending.files:
            parts.append(f"{len(pending.files)} files of metrics and logs")
        if not parts:
            return None
        why = [f"{name}: {reason}" for name, reason in refused.items()]
        why += [self._failure] if self._failure else []
        reason = "; ".join(one.removesuffix(".") for one in why) or "they took too long"
        return (
            f"Not uploaded to {self.mirror.url}: {' and '.join(parts)} ({reason}). They are "
            f"complete in the local copy {str(self.mirror.path)!r}. Upload them with: "
            f"modelzoo-trainer checkpoint upload {shlex.quote(str(self.mirror.path))}"
        )
