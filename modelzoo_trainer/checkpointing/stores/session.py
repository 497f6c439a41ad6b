"""What a process does with the store of a run: lock it, upload to it, and leave it in order."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.checkpointing.stores.cache import clean
from modelzoo_trainer.checkpointing.stores.lease import LEASE_S, open_lease
from modelzoo_trainer.checkpointing.stores.mirror import Mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.uploader import Uploader
from modelzoo_trainer.errors import ConfigError, StoreError

log = logging.getLogger("modelzoo_trainer.stores")

_LARGE_BYTES: Final = 1 << 26

_OPEN: Final[dict[str, StoreSession]] = {}
_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How often and how long a run uses the store.

    Args:
        sync_s: Time between two uploads of metrics and logs.
        lease_s: Time after which a run that no longer answers counts as dead.
        wait_s: How long the end of a run waits for uploads without any progress.
    """

    sync_s: float = 30.0
    lease_s: float = LEASE_S
    wait_s: float = 600.0


class StoreSession:
    """The lock on a prefix, and the uploads to it; shared by the trainers of a process.

    Args:
        mirror: The mirror of the prefix.
        times: How often it is used.
        cache_bytes: The most that local copies may take; None = two checkpoints.
    """

    def __init__(self, mirror: Mirror, times: Times, cache_bytes: int | None) -> None:
        self.mirror = mirror
        self.times = times
        self.lease = open_lease(mirror.url, mirror.options, seconds=times.lease_s)
        self.uploader: Uploader  # set in `_open`, before anybody gets the session
        self._cache_bytes = cache_bytes
        self._num_users = 0
        self._reported: str | None = None
        self._pid = os.getpid()

    @classmethod
    def begin(cls, mirror: Mirror, times: Times, cache_bytes: int | None) -> StoreSession:
        """Check and lock the prefix, and bring the mirror up to date.

        Raises:
            ConfigError: If the store cannot be used, or another run holds the lock.
            StoreError: If the store does not answer.
        """
        with _LOCK:
            known = _OPEN.get(str(mirror.path))
            if known is None or known._pid != os.getpid():
                known = cls(mirror, times, cache_bytes)
                known._open()
                _OPEN[str(mirror.path)] = known
            known._num_users += 1
            return known

    def _open(self) -> None:
        try:
            self.mirror.store.probe()
            self.lease.take()
            try:
                clean(self.mirror)
                pull(self.mirror, owns=True)
            except BaseException:
                self.lease.release()
                raise
        except OSError as error:
            if isinstance(error, StoreError) and error.is_temporary:
                raise  # a restart may succeed
            raise ConfigError(str(error)) from None
        self.uploader = Uploader(
            self.mirror,
            sync_s=self.times.sync_s,
            cache_bytes=self._cache_bytes,
            check=self.lease.check,
        )

    def start(self) -> None:
        """Upload in the background from now on."""
        self.uploader.start()

    def ask(self) -> None:
        """Have new checkpoints sent now; returns at once."""
        if self._pid == os.getpid():
            self.uploader.ask()

    def begin_to_finish(self) -> None:
        """Upload everything from now on."""
        self.uploader.begin_to_finish()

    def is_over(self, wait_s: float) -> bool:
        """Wait for a while; return whether everything is in the store, or there is no hope."""
        return self.uploader.is_over(self.times.wait_s, wait_s)

    def end_of_finish(self) -> str | None:
        """Return what is not in the store, and why; None = nothing."""
        self._reported = self.uploader.end_of_finish()
        return self._reported

    def end(self, *, has_run: bool) -> None:
        """Upload what is left, and release the lock when no trainer uses it. Logs failures.

        `has_run`: whether a trainer has done anything; else there is nothing to keep.
        """
        with _LOCK:
            self._num_users -= 1
            if self._num_users > 0 or self._pid != os.getpid():
                return
            _OPEN.pop(str(self.mirror.path), None)
        self.uploader.stop()
        if has_run and not self._reported and self.uploader.report() is not None:
            num_bytes = self.uploader.pending_bytes
            if num_bytes > _LARGE_BYTES:  # a warning, as the log of the run is closed
                size = f"{num_bytes / 1e6:.0f} MB"
                log.warning("Uploading %s to %s before the end.", size, self.mirror.url)
            self.uploader.round()
            if text := self.uploader.report():
                log.error("%s", text)
        try:
            self.lease.release()
        except (StoreError, OSError) as error:
            log.warning("%s", error)
