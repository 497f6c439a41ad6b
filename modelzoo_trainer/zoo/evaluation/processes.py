"""Work of the main process for all processes: `lm_eval` runs there alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.evaluation.rows import joined

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Comm

_ALIVE_S: Final = 60.0  # much less than the timeout of what waits for a message
_WORK, _ALIVE, _END = "work", "alive", "end"

Perform = Callable[[str, dict[str, Any]], dict[str, Any]]


class Interrupted(Exception):
    """The evaluation was stopped at a batch; it is not a failure."""


class Processes:
    """All processes of a run: the main one sends work and the others wait for it.

    Each process performs its part of a work; the main process returns the parts together.

    Args:
        comm: Communication between the processes.
        perform: Does this process's part of a work, by the work's kind and its values.

    Attributes:
        is_busy: Whether a work has begun, and not ended.
    """

    def __init__(self, comm: Comm, perform: Perform) -> None:
        self._comm = comm
        self._perform = perform
        self._lock = threading.Lock()
        self.is_busy = False

    def run(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the results of all processes. Called by the main process only."""
        with self._lock:
            self.is_busy = True
            self._comm.broadcast_object([_WORK, kind, values])
            found = self._results(kind, values)
            self.is_busy = False
        return found

    def serve(self) -> None:
        """Do the work that the main process sends, until it ends. Called by the others.

        Raises:
            ConfigError: If the evaluation has ended with one there.
            RuntimeError: If it has failed there.
        """
        while True:
            message, *rest = self._comm.broadcast_object(None)
            if message == _WORK:
                kind, values = rest
                try:
                    self._results(kind, values)
                except Interrupted:
                    continue  # the main process, which was interrupted as well, ends it
            elif message == _END:
                problem, is_of_config = rest
                if problem:
                    raise (ConfigError if is_of_config else RuntimeError)(problem)
                return

    def _results(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        try:
            found = self._perform(kind, values)
        except Interrupted:
            self.is_busy = False
            raise
        return joined(self._comm.gather_object(found))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context manager of the main process, at whose end the others end as well."""
        if self._comm.world_size == 1:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(target=self._stay_alive, args=(is_over,), daemon=True)
        thread.start()
        problem, is_of_config = "", False
        try:
            yield
        except Exception as error:
            problem, is_of_config = str(error) or type(error).__name__, True
            is_of_config = isinstance(error, ConfigError)
            if isinstance(error, Interrupted):
                problem = ""
            raise
        finally:
            is_over.set()
            thread.join()
            if not self.is_busy:  # else the others wait for something else
                self._comm.broadcast_object([_END, problem, is_of_config])

    def _stay_alive(self, is_over: threading.Event) -> None:
        """Send messages while the main process does what takes long, such as loading data."""
        while not is_over.wait(_ALIVE_S):
            if self._lock.acquire(blocking=False):
                try:
                    if not is_over.is_set():
                        self._comm.broadcast_object([_ALIVE])
                finally:
                    self._lock.release()
