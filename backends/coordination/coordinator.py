"""Threads of each rank that exchange events over the rendezvous store."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from torch._C._distributed_c10d import Store

from . import consensus
from .consensus import Consensus, EventLog
from .failures import Failure, dump_stacks, end_process, gone, silent
from .heartbeat import Heartbeats, missing_ranks
from .liveness import StallTimer
from .rendezvous import own_connection

_BEAT_S: Final = 1.0
_FIRST_BEATS_S: Final = 0.05  # until rank 0 is known, without which its stop is not detected
_LOOK_S: Final = 0.5
_CAUSE_S: Final = 2.0
_PUBLISH_S: Final = 5.0
_LINGER_S: Final = 2.0


class Coordinator:
    """Events sent to and received from other ranks, besides collectives.

    Three threads: one waits for announcements in the store; one announces, and sends and checks
    heartbeats; one never uses the store, which may not respond, and ends the process when the run
    has failed and the main thread does not end by itself. A rank writes and reads two small values
    per second.

    The store is hosted by rank 0. A rank without a heartbeat for `alive_timeout` seconds is
    considered lost; after a failure a main thread has `grace` seconds to end by itself.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        alive_timeout: float = 15.0,
        grace: float = 3.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.failure: Failure | None = None
        """The first failure of the run, once known."""
        self.on_abort: Callable[[Failure], None] | None = None
        """Called before a thread ends this process."""
        self._alive_timeout = alive_timeout
        self._grace = grace
        self._listening = EventLog(own_connection(store))
        self._speaking = EventLog(own_connection(store))
        self._beats = Heartbeats(self._speaking.store, rank, world_size, alive_timeout, _BEAT_S)
        self._consensus = Consensus()
        self.decided: Callable[[], tuple[str, ...]] = self._consensus.decided
        """Advances to the next decision point; returns the topics that all ranks act on there.

        For the main thread; each rank makes the same calls, in the same order.
        """
        self._to_say: queue.SimpleQueue[consensus.Entry | None] = queue.SimpleQueue()
        self._learning = threading.Lock()
        self._is_known = threading.Event()
        self._is_leaving = threading.Event()
        self._has_ended = threading.Event()
        self._num_trips = 0
        self._threads = [
            threading.Thread(target=target, name=f"control: {name}", daemon=True)
            for name, target in (
                ("listener", self._listen),
                ("speaker", self._speak),
                ("guard", self._guard),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        self._beats.register()
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Announce this rank's regular exit. Called by all ranks.

        Proposals without a decision are dropped: there are no more decision points.

        Waits `timeout_s` (None = `grace`) for the others to announce it too: rank 0 hosts the
        store, and answers are needed until all have reached their last point.
        """
        if not self._threads[0].is_alive():
            self._is_leaving.set()
            return
        if self.failure is None:
            self._to_say.put({"what": consensus.OVER})
            deadline = time.monotonic() + (self._grace if timeout_s is None else timeout_s)
            while self.failure is None and time.monotonic() < deadline:
                if self._has_ended.wait(_LOOK_S):
                    break
        self._is_leaving.set()
        self._to_say.put(None)
        for thread in self._threads if self._has_ended.is_set() else self._threads[1:]:
            if thread is not threading.current_thread():
                thread.join(_LOOK_S)

    def propose(self, topic: str) -> None:
        """Make `decided` return a topic on all ranks at the same point.

        Never waits: may be called from any thread and in a signal handler.

        A topic that is proposed again before it is returned is returned once.
        """
        point = self._consensus.point
        self._to_say.put({"what": consensus.PROPOSE, "topic": topic, "point": point})

    def fail(self, message: str, *, code: int = 1, kind: str = "error") -> Failure:
        """End the run on all ranks; return the actual cause.

        `code`: the exit code of the processes. `kind`: as in `Failure`; with "lost", first looks up
        to two seconds for the rank whose end has caused this; with "hang", every rank writes its
        stacks to stderr before it ends.

        Returns:
            The first failure of the run: this one, or an earlier one.
        """
        mine = Failure(self.rank, message, code, kind)
        if kind == "lost" and self.failure is None:
            self._to_say.put({"what": consensus.LIVENESS_CHECK})
            self._is_known.wait(_CAUSE_S)
        if self.failure is None:
            self._to_say.put({"what": consensus.FAIL, **mine.as_entry()})
            self._is_known.wait(_PUBLISH_S)
        failure = self._learn(mine)
        if self.rank == 0:
            self._linger(failure)
        return failure

    # ---- receiving

    def _listen(self) -> None:
        try:
            while not self._has_ended.is_set() and self.failure is None:
                self._hear(*self._listening.next())
        except Exception:  # noqa: BLE001  # stores raise various types
            self._lose_store()

    def _hear(self, number: int, entry: consensus.Entry) -> None:
        what = entry["what"]
        store = self._listening.store
        if what == consensus.PROPOSE and not self._listening.is_over:
            store.set(f"points/{number}/{self.rank}", str(self._consensus.hold(number)))
            if store.add(f"points/{number}", 1) == self.world_size:
                self._commit(number, entry["topic"])
        elif what == consensus.COMMIT:
            self._consensus.commit(entry["number"], entry["topic"], entry["point"])
        elif what == consensus.FAIL:
            fields = {key: entry[key] for key in Failure.__dataclass_fields__}
            store.add("heard", 1)
            self._learn(Failure(**fields))
        elif what == consensus.LIVENESS_CHECK:
            store.set(f"here/{self.rank}", "here")
            store.add("here", 1)
        elif what == consensus.OVER:
            self._consensus.drop()
        elif what == consensus.END:
            self._has_ended.set()

    def _commit(self, number: int, topic: str) -> None:
        """Announce the decision, after all ranks including this one have answered."""
        store = self._listening.store
        keys = [f"points/{number}/{rank}" for rank in range(self.world_size)]
        is_quick = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
        points = store.multi_get(keys) if is_quick else map(store.get, keys)
        entry = {"what": consensus.COMMIT, "number": number, "topic": topic}
        self._announce({**entry, "point": max(map(int, points)) + 1})

    def _announce(self, entry: consensus.Entry) -> None:
        """Write to the log from the listening thread, through a separate reader."""
        writer = EventLog(self._listening.store)
        writer.num_read = self._listening.num_read
        writer.post(entry)

    def _learn(self, failure: Failure) -> Failure:
        """Record a failure and return the first one of the run."""
        with self._learning:
            if self.failure is None:
                self.failure = failure
                if failure.kind == "hang":
                    dump_stacks(self.rank, failure)
                self._is_known.set()
                self._consensus.abort(failure)
                self._beats.kill_stopped()
            return self.failure

    def _lose_store(self) -> None:
        """Treat rank 0 as lost, unless its store is expected to be gone."""
        # A rank has reached the end of the run: the store may go. Either thread may be late.
        if self._listening.is_over or self._speaking.is_over:
            self._has_ended.set()
        if not (self._is_leaving.is_set() or self._has_ended.is_set()):
            time.sleep(_LOOK_S / 2)  # the other thread may be about to receive the cause
            self._learn(gone(0, self.rank))

    # ---- sending

    def _speak(self) -> None:
        next_beat = time.monotonic()
        try:
            while True:
                with suppress(queue.Empty):
                    entry = self._to_say.get(timeout=max(next_beat - time.monotonic(), 0.0))
                    if entry is None:
                        return
                    self._say(entry)
                if time.monotonic() >= next_beat:
                    self._beat()
                    pause_s = _BEAT_S if self._beats.knows_host else _FIRST_BEATS_S
                    next_beat = time.monotonic() + pause_s
        except Exception:  # noqa: BLE001  # stores raise various types
            self._lose_store()

    def _say(self, entry: consensus.Entry) -> None:
        self._speaking.post(entry)
        store = self._speaking.store
        if entry["what"] == consensus.OVER:
            self._beats.announce_exit()
            if store.add("left", 1) == self.world_size:
                self._speaking.post({"what": consensus.END})
        elif entry["what"] == consensus.LIVENESS_CHECK and not self._is_known.is_set():
            ranks = missing_ranks(store, self.world_size, self._is_known)
            ranks = [rank for rank in ranks if not self._beats.is_seen(rank)]  # only late
            if ranks and not self._is_known.is_set():
                lost = gone(ranks[0], self.rank)
                self._speaking.post({"what": consensus.FAIL, **lost.as_entry()})

    def _beat(self) -> None:
        failure = self._beats.beat()
        self._num_trips += 1
        if failure is not None and self.failure is None and not self._has_ended.is_set():
            self._speaking.post({"what": consensus.FAIL, **failure.as_entry()})
            self._beats.kill(failure.rank)

    def _linger(self, failure: Failure) -> None:
        """Wait shortly until the others know of the failure: the store ends with this process."""
        num = self.world_size - (failure.kind == "lost")
        deadline = time.monotonic() + _LINGER_S
        with suppress(Exception):
            while self._speaking.store.add("heard", 0) < num and time.monotonic() < deadline:
                time.sleep(0.02)

    # ---- the end

    def _guard(self) -> None:
        timer = StallTimer(_LOOK_S)
        while not self._is_known.wait(_LOOK_S):
            if self._is_leaving.is_set() or self._has_ended.is_set():
                return
            failure = self._beats.find_stopped()
            limit_s = self._alive_timeout * self._beats.timeout_factor(0)
            if failure is not None:
                self._to_say.put({"what": consensus.FAIL, **failure.as_entry()})
            elif timer.is_stalled(self._num_trips, limit_s):
                failure = silent(0, limit_s, self.rank)
            if failure is not None:
                self._learn(failure)
                self._beats.kill(failure.rank)
        if not self._is_leaving.wait(self._grace) and self.failure is not None:
            if self.on_abort is None:
                with suppress(Exception):
                    sys.stderr.write(f"ending process {self.rank}: {self.failure}\n")
            end_process(self.failure, self.on_abort)
