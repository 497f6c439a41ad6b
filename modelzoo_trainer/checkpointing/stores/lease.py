"""The lock of a prefix: an object that its holder renews, written under conditions.

No clocks of different machines are compared. A process that finds the lock watches it: if it does
not change for as long as its holder promised to renew it, by the clock of the process that waits,
the holder has died or cannot reach the store, and the lock is taken from exactly that state.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import xxhash

from modelzoo_trainer.base.sibling import require_sibling
from modelzoo_trainer.checkpointing.stores.store import Store, Tag, open_store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import ConfigError, NoSuchObject, ObjectChanged, StoreError

require_sibling("backends")
from backends.coordination.liveness import Identity, StallTimer, own_identity  # noqa: E402

log = logging.getLogger("modelzoo_trainer.stores")
LOCK_NAME: Final = ".lock"
LEASE_S: Final = 90.0
MAX_LEASE_S: Final = 600.0
_RENEWALS: Final = 4  # per lease
_LOOKS: Final = 20  # per lease, while waiting for it
_LONGEST_LOOK_S: Final = 5.0
_LEFT: Final[set[str]] = set()
"""Holders of this process that are gone, but could not say so."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock; the content of its object.

    Args:
        holder: Random name of the holder.
        epoch: How often the lock was taken.
        renewal: Random name of this renewal: no content is written twice.
        seconds: Seconds within which the holder renews it.
        host: Name of its machine, for messages.
        boot: Identifies the machine since its start, and the container.
        pid: Its process.
        born: Start time of that process.
        since: When the lock was taken by the holder's clock, for messages.
        is_released: Whether it is free.
    """

    holder: str
    epoch: int
    renewal: str
    seconds: float
    host: str
    boot: str | None
    pid: int
    born: str | None
    since: str
    is_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"

    @property
    def identity(self) -> Identity:
        """Identifies its process."""
        return Identity(self.boot, self.pid, self.born)


def open_lease(
    url: StoreUrl, options: Mapping[str, Any] | None = None, *, seconds: float = LEASE_S
) -> Lease:
    """Return the lock of a prefix, whose requests end within a part of a lease.

    Raises:
        ConfigError: If the length of the lease or an option is invalid.
    """
    if not 0 < seconds <= MAX_LEASE_S:
        raise ConfigError(
            f"lease_seconds: expected a number above 0, up to {MAX_LEASE_S:g}, got {seconds!r}"
        )
    limits = {"request_seconds": seconds / 6, "retry_seconds": seconds / 6}
    return Lease(open_store(url, {**(options or {}), **limits}), seconds=seconds)


class Lease:
    """Lock a prefix against other processes, and renew the lock in a thread.

    The trainers of a process that share this object share the lock. Forked processes do not hold
    it. If the store cannot be reached, the lock remains valid until another process takes it.

    Args:
        store: The prefix; its time limits must be shorter than a lease.
        seconds: How long the lock remains after the last renewal.
        setting: The name of the prefix's setting, for messages.
    """

    def __init__(
        self, store: Store, *, seconds: float = LEASE_S, setting: str = "model_dir"
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._setting = setting
        self._mutex = threading.RLock()
        self._count = 0
        self._pid = 0
        self._tag: Tag | None = None
        self._holder: Holder | None = None
        self.previous: str | None = None
        """The `token` that held the lock before this process took it; None = no one."""
        self._names: set[str] = set()  # also of requests that seemed to have failed
        self._renewed_at = 0.0
        self._winner: str | None = None
        self._stop = threading.Event()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock, as far as it knows."""
        return self._count > 0 and self._pid == os.getpid() and self._winner is None

    @property
    def token(self) -> str:
        """A random name of this holding of the lock; empty if it is not held."""
        return "" if self._holder is None else self._holder.holder

    @property
    def epoch(self) -> int:
        """How often the lock of the prefix was taken until now; 0 if it is not held."""
        return 0 if self._holder is None else self._holder.epoch

    def take(self) -> None:
        """Lock the prefix; waits for one lease if its holder may have died.

        Raises:
            ConfigError: If another process holds the lock.
            StoreError: If the store refuses or does not answer.
        """
        if self._count and self._pid == os.getpid():
            self._count += 1
            return
        self._forget()
        holder = self._new_holder()
        self._names.add(holder.holder)
        try:
            self._holder = self._acquire(holder)
        except StoreError:
            _LEFT.add(holder.holder)  # the request may have been carried out
            raise
        self._pid, self._count = os.getpid(), 1
        threading.Thread(
            target=self._keep, args=(self._stop,), name="store lock", daemon=True
        ).start()

    def check(self) -> None:
        """Check that this process still holds the lock; renew it if it is old.

        Raises:
            ConfigError: If another process has taken it.
            StoreError: If it is old and the store refuses or does not answer.
        """
        if not self._count or self._pid != os.getpid():
            return
        if self._winner is None and _now() - self._renewed_at > self._seconds / 2:
            self._renew()
        self.require()

    def require(self) -> None:
        """Check that the lock is not known to be lost; makes no request.

        Raises:
            ConfigError: If another process has taken it.
        """
        if self._winner is not None and self._pid == os.getpid():
            raise ConfigError(
                f"{self._setting} '{self._store.url}' was taken by {self._winner}: this process "
                f"had not renewed its lock for {self._seconds:g} s. Nothing more is written there."
            )

    def release(self) -> None:
        """Release the lock. Idempotent; a failure is logged, and the lock ends by itself."""
        if not self._count or self._pid != os.getpid():
            return
        self._count -= 1
        if self._count:
            return
        self._stop.set()
        with self._mutex:
            if self._winner is None:
                try:
                    self._write(is_released=True)
                except (ConfigError, StoreError) as error:
                    log.warning("The lock of %s was not released: %s", self._store.url, error)
                    _LEFT.add(self.token)
            self._forget()

    def _forget(self) -> None:
        self._mutex = threading.RLock()  # a fork may have copied a locked one
        self._stop = threading.Event()
        self._tag = self._holder = self._winner = None
        self._count = 0

    def _new_holder(self) -> Holder:
        identity = own_identity()
        return Holder(
            holder=secrets.token_hex(8),
            epoch=1,
            renewal=secrets.token_hex(8),
            seconds=self._seconds,
            host=platform.node(),
            boot=identity.host,
            pid=identity.pid,
            born=identity.born,
            since=time.strftime("%F %T"),
        )

    def _acquire(self, holder: Holder) -> Holder:
        """Create the lock, or take a free or abandoned one; return what was written."""
        interval_s = min(self._seconds / _LOOKS, _LONGEST_LOOK_S)
        timer = StallTimer(interval_s)
        watched: Tag | None = None
        while True:
            begun = _now()
            try:
                data, tag = self._store.read(LOCK_NAME)
            except NoSuchObject:
                self._tag, self._renewed_at, self.previous = self._create(holder), begun, None
                if self._tag is not None:
                    return holder
                continue
            found = _decoded(data)
            limit_s = self._seconds if found is None else found.seconds
            is_stalled = timer.is_stalled(tag, limit_s)
            if is_stalled or (found is not None and self._is_free(found)):
                if found is not None:
                    holder = replace(holder, epoch=found.epoch + 1)
                with suppress(ObjectChanged):
                    self._tag = self._store.replace(LOCK_NAME, _encoded(holder), tag)
                    self._renewed_at = begun
                    self.previous = None if found is None else found.holder
                    return holder
                continue
            if found is not None and (found.identity.is_seen() or watched not in (None, tag)):
                raise ConfigError(
                    f"{self._setting} '{self._store.url}' is in use by {found}. Wait until that "
                    f"run has ended, or use another {self._setting}."
                )
            if watched is None:
                log.warning(
                    "%s is locked by %s, which may have died: waiting up to %.0f s for it.",
                    self._store.url,
                    found or "an unknown process",
                    limit_s,
                )
            watched = tag
            time.sleep(interval_s)

    def _keep(self, stop: threading.Event) -> None:
        """Renew the lock until it is released or lost."""
        pause_s = self._seconds / _RENEWALS
        has_failed = False
        while not stop.wait(pause_s) and self._winner is None:
            try:
                self._renew(stop)
                has_failed = False
            except StoreError as error:
                if not has_failed:
                    log.warning("The lock cannot be renewed (%s); trying again.", error)
                has_failed = True
            pause_s = self._seconds / (_LOOKS if has_failed else _RENEWALS)

    def _renew(self, stop: threading.Event | None = None) -> None:
        with self._mutex:
            is_stopped = self._holder is None or (stop is not None and stop.is_set())
            if self._winner is None and not is_stopped:
                self._write()

    def _write(self, *, is_released: bool = False) -> None:
        """Write a new content over the own one; note who has the lock if it is another's."""
        assert self._holder is not None
        assert self._tag is not None
        begun = _now()
        holder = replace(self._holder, renewal=secrets.token_hex(8), is_released=is_released)
        tag: Tag | None
        try:
            tag = self._store.replace(LOCK_NAME, _encoded(holder), self._tag)
        except ObjectChanged:
            tag = self._again(holder)
        if tag is not None:
            self._tag, self._renewed_at = tag, begun

    def _again(self, holder: Holder) -> Tag | None:
        """Write the lock after it changed: by a lost request of this process, or by another."""
        try:
            data, tag = self._store.read(LOCK_NAME)
        except NoSuchObject:
            created = self._create(holder)
            if created is not None:
                log.warning("The lock of %s was deleted; it is locked again.", self._store.url)
                return created
            data, tag = self._store.read(LOCK_NAME)
        found = _decoded(data)
        if found is None:
            raise StoreError(f"{self._store.url / LOCK_NAME} is damaged", is_temporary=True)
        if found.holder in self._names:
            with suppress(ObjectChanged):
                return self._store.replace(LOCK_NAME, _encoded(holder), tag)
        self._winner = str(found)
        log.error(
            "The lock of %s was taken by %s: no more checkpoints are uploaded there.",
            self._store.url,
            self._winner,
        )
        return None

    def _create(self, holder: Holder) -> Tag | None:
        return self._store.create_tagged(LOCK_NAME, _encoded(holder))

    def _is_free(self, found: Holder) -> bool:
        is_left = found.holder in self._names or found.holder in _LEFT
        return found.is_released or is_left or found.identity.is_gone()


def _encoded(holder: Holder) -> bytes:
    facts = asdict(holder)
    return json.dumps({"lock": facts, "xxh3_128": _digest(facts)}, indent=1).encode()


def _digest(facts: Any) -> str:
    return xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _decoded(data: bytes) -> Holder | None:
    """Return the holder; None if it cannot be read."""
    try:
        raw = json.loads(data)
        holder = Holder(**raw["lock"])
        is_valid = raw["xxh3_128"] == _digest(raw["lock"]) and 0 < holder.seconds <= MAX_LEASE_S
    except (ValueError, TypeError, LookupError):
        return None
    return holder if is_valid else None


def _now() -> float:
    """Return seconds of a clock that also runs while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
