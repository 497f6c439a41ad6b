"""Process units in several processes, in order."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from modelzoo_trainer.zoo.rows.preprocessing.readers import Unit
from modelzoo_trainer.zoo.rows.preprocessing.worker import Result, UnitWork, WorkerFailure, serve
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

log = logging.getLogger("modelzoo_trainer.preprocessing")

_AHEAD: Final = 2
"""Units that a worker has at a time: one in work, one waiting."""
_WINDOW: Final = 4
"""Units per worker that are in work, or done and waiting for an earlier one."""
_EXIT_S: Final = 5.0


class WorkerError(RuntimeError):
    """Documents cannot be processed: a process has died, or an exception is not of a setting."""


class Worker:
    """A process with its connection."""

    def __init__(self, settings: PreprocessingSettings) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would keep ends of other pipes
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.num_units = 0

    def send(self, unit: Unit) -> None:
        """Give it a unit."""
        self.num_units += 1
        try:
            self.connection.send(unit)
        except OSError:
            self._raise_death()

    def receive(self) -> Any:
        """Return its next answer."""
        self.num_units -= 1
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._raise_death()

    def _raise_death(self) -> NoReturn:
        self.process.join(_EXIT_S)
        code = self.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise WorkerError(
            f"A worker process has died ({how}); it may have run out of memory. Run the same "
            "command again to continue."
        )


class Pool:
    """Worker processes; with one, the work is done in this process.

    Args:
        settings: The settings of the run; `setup.processes` is the number of processes that
            tokenize.
    """

    def __init__(self, settings: PreprocessingSettings) -> None:
        self._settings = settings
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def results(self, units: Iterable[Unit], work: UnitWork) -> Iterator[Result]:
        """Yield the results of units, in order.

        Args:
            units: Any number.
            work: Used with one process.

        Raises:
            ConfigError: If a setting or the input is invalid.
            ReadHookError: If a read hook raised an exception.
            WorkerError: If a worker died, or other code raised one.
        """
        count = self._settings.setup.processes
        if count == 1:
            for unit in units:
                try:
                    result = work(unit)
                except Exception as error:  # noqa: BLE001  # as from a worker process
                    _raise(WorkerFailure.of(error), error)
                yield result
            return
        yield from self._spread(units, count)

    def _spread(self, units: Iterable[Unit], count: int) -> Iterator[Result]:
        done: dict[int, Result] = {}
        order: list[int] = []
        for unit in units:
            while (worker := self._free(count)) is None or len(order) >= count * _WINDOW:
                self._receive(done)
                yield from _ready(done, order)
            worker.send(unit)
            order.append(unit.number)
        while order:
            self._receive(done)
            yield from _ready(done, order)

    def _free(self, count: int) -> Worker | None:
        """Return a worker that takes another unit, starting one if there are fewer than `count`."""
        idle = next((one for one in self._workers if one.num_units == 0), None)
        if idle is None and len(self._workers) < count:
            idle = Worker(self._settings)
            self._workers.append(idle)
        if idle is not None:
            return idle
        least = min(self._workers, key=lambda one: one.num_units)
        return least if least.num_units < _AHEAD else None

    def _receive(self, done: dict[int, Result]) -> None:
        """Wait for at least one result."""
        busy = {one.connection: one for one in self._workers if one.num_units}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            answer = busy[connection].receive()
            if isinstance(answer, WorkerFailure):
                _raise(answer)
            done[answer.number] = answer


def _ready(done: dict[int, Result], order: list[int]) -> Iterator[Result]:
    while order and order[0] in done:
        yield done.pop(order.pop(0))


def _raise(failure: WorkerFailure, cause: Exception | None = None) -> NoReturn:
    if failure.traceback:
        log.error("%s", failure.traceback)
    error = (failure.kind or WorkerError)(failure.message)
    for note in failure.notes:
        error.add_note(note)
    raise error from cause
