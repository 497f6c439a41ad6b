"""A list of announcements in the store, which all processes read in the same order."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

Entry = dict[str, Any]
PROPOSE: Final = "propose"
COMMIT: Final = "commit"
FAIL: Final = "fail"
ROLL_CALL: Final = "roll call"
OVER: Final = "over"
END: Final = "end"
# Time-outs of a wait are written to standard error by the store, so that there are none.
_FOREVER: Final = timedelta(days=7)


class Board:
    """One reader and writer of the board; not to be used by two threads.

    It never waits to write: entries are numbered, and the first to write a number has it. Those who
    come too late read what was written, which may make their own entry needless. So a signal that
    reaches a thousand processes at once makes one entry, not a thousand.

    Args:
        store: A connection of its own.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_read = 0
        self.failure: Entry | None = None
        self.roll_call: int | None = None
        self.is_over = False
        self._open: dict[int, str] = {}
        self._committed: dict[str, int] = {}

    def next(self) -> tuple[int, Entry]:
        """Wait for the next entry; return it with its number."""
        key = self._key()
        while True:
            with suppress(DistStoreError):
                self.store.wait([key], _FOREVER)
                return self._read(self.store.get(key))

    def post(self, entry: Entry) -> bool:
        """Write an entry; return whether that was needed, given what others have written."""
        text = json.dumps({**entry, "id": uuid.uuid4().hex})
        while True:
            while self.store.check([self._key()]):  # what is read late may be settled by now
                self._read(self.store.get(self._key()))
            if self._is_needless(entry):
                return False
            found = self.store.compare_set(self._key(), "", text)
            self._read(found)
            if found == text.encode():
                return True

    def _key(self) -> str:
        return f"board/{self.num_read}"

    def _read(self, text: bytes) -> tuple[int, Entry]:
        number, entry = self.num_read, json.loads(text)
        self.num_read += 1
        what = entry["what"]
        if what == PROPOSE:
            self._open[number] = entry["topic"]
        elif what == COMMIT:
            self._open.pop(entry["number"], None)
            self._committed[entry["topic"]] = entry["point"]
        elif what == FAIL and self.failure is None:
            self.failure = entry
        elif what == ROLL_CALL and self.roll_call is None:
            self.roll_call = number
        elif what == OVER:
            self.is_over = True
        return number, entry

    def _is_needless(self, entry: Entry) -> bool:
        what = entry["what"]
        if what == PROPOSE:
            topic = entry["topic"]
            is_coming = self._committed.get(topic, 0) > entry["point"]
            return self.is_over or is_coming or topic in self._open.values()
        if what == FAIL:
            return self.failure is not None
        if what == ROLL_CALL:
            return self.roll_call is not None or self.failure is not None
        return what == OVER and self.is_over
