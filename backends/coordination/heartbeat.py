"""Heartbeats of the ranks of a run, and detection of missing ones."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from typing import Final

from torch._C._distributed_c10d import Store

from .failures import Failure, gone, silent, stopped
from .liveness import Identity, StallTimer, own_identity

_LEFT: Final = b"left"
_FAR_AWAY: Final = 4.0
_STOPPED_S: Final = 3.0
_LIVENESS_CHECK_S: Final = 1.2
_PAUSE_S: Final = 0.1


class Heartbeats:
    """Send heartbeats of this rank, and watch another rank's.

    Each rank watches the next one that has not left, in a ring. A rank on the same host also counts
    as alive while it uses CPU time, as a library may hold its GIL.

    A rank is considered lost after `limit_s` without a heartbeat; one is sent every `interval_s`.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, limit_s: float, interval_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._num = world_size
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._num_beats = 0
        self._stop_timer = StallTimer(interval_s)
        self._has_left = False
        self._identities: dict[int, Identity] = {}
        self._watch((rank + 1) % world_size)

    def register(self) -> None:
        """Publish the identity of this process."""
        self._store.set(f"who/{self._rank}", json.dumps(asdict(own_identity())))

    def beat(self) -> Failure | None:
        """Send a heartbeat, and return a failure if the watched rank is lost.

        Cost:
            Three small messages to the store.
        """
        if not self._has_left:
            self._num_beats += 1
            self._store.set(f"alive/{self._rank}", str(self._num_beats))
        self._lookup(0)  # needed later if the store stops responding
        peer = self._peer
        if peer == self._rank or not self._lookup(peer):
            return None
        identity = self._identities[peer]
        is_gone = identity.is_gone()  # checked before its last heartbeat is read
        found = self._store.get(f"alive/{peer}") if self._store.check([f"alive/{peer}"]) else b""
        if found == _LEFT:
            self._watch((peer + 1) % self._num)
            return None
        if is_gone:
            return gone(peer, self._rank)
        limit_s = self._limit_s * self.timeout_factor(peer)
        is_lost = self._peer_timer.is_stalled((found, identity.work()), limit_s)
        return silent(peer, limit_s, self._rank) if is_lost else None

    @property
    def knows_host(self) -> bool:
        """Whether the process that hosts the store is known."""
        return 0 in self._identities

    def timeout_factor(self, rank: int) -> float:
        """Return the factor on the limit after which a silent rank is lost.

        On another host it cannot be seen whether a rank without heartbeats uses CPU time.
        """
        known = self._identities.get(rank)
        return 1.0 if known is not None and known.is_here() else _FAR_AWAY

    def announce_exit(self) -> None:
        """Announce that no more heartbeats follow."""
        self._has_left = True
        self._store.set(f"alive/{self._rank}", _LEFT.decode())

    def find_stopped(self) -> Failure | None:
        """Return a failure if a process on this host was stopped by a signal some seconds ago.

        Does not use the store, which may not respond. A process that is blocked in a library sends
        no heartbeats either, but only a stopped one must be continued by someone.
        """
        ranks = self._stopped_ranks()
        first = ranks[0] if ranks else object()  # not equal to any rank
        is_over = self._stop_timer.is_stalled(first, _STOPPED_S)
        return stopped(ranks[0], _STOPPED_S, self._rank) if ranks and is_over else None

    def _stopped_ranks(self) -> list[int]:
        known = self._identities.copy()  # the other thread adds to it
        return [rank for rank in known if rank != self._rank and known[rank].is_stopped()]

    def is_seen(self, rank: int) -> bool:
        """Return whether a process on this host is known to exist, responding or not."""
        return self._lookup(rank) and self._identities[rank].is_seen()

    def kill(self, rank: int) -> None:
        """Kill a process on this host that sends no heartbeats: it may only be stopped."""
        if rank != self._rank and rank in self._identities:
            self._identities[rank].kill()

    def kill_stopped(self) -> None:
        """Kill processes on this host that were stopped by a signal: they cannot end themselves."""
        for rank in self._stopped_ranks():
            self.kill(rank)

    def _watch(self, rank: int) -> None:
        self._peer = rank
        self._peer_timer = StallTimer(self._interval_s)

    def _lookup(self, rank: int) -> bool:
        if rank not in self._identities:
            if not self._store.check([f"who/{rank}"]):
                return False
            self._identities[rank] = Identity(**json.loads(self._store.get(f"who/{rank}")))
        return True


def missing_ranks(store: Store, world_size: int, is_known: threading.Event) -> list[int]:
    """Return the ranks that have not answered the liveness check after a short time.

    `is_known` ends the wait: the cause is known.
    """
    deadline = time.monotonic() + _LIVENESS_CHECK_S
    while store.add("here", 0) < world_size:
        if is_known.wait(_PAUSE_S):
            return []
        if time.monotonic() >= deadline:
            return [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
    return []
