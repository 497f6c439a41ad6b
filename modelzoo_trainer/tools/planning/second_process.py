"""A second process, which measures the longer of the two models that a measurement compares."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from modelzoo_trainer.base.cores import num_cores
from modelzoo_trainer.base.devices import fake_world
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.planning.figures import Measured
from modelzoo_trainer.tools.planning.measure import Built, measure_longer
from modelzoo_trainer.tools.planning.meshes import Choice

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from modelzoo_trainer.config.plan import TrainerPlan

LoadPlans = Callable[[list[str]], "Sequence[TrainerPlan]"]


class SecondProcess:
    """Answers one question at a time: what `measure_longer` returns for a choice."""

    def __init__(self, load: LoadPlans, index: int, *, use_data: bool) -> None:
        spawning = multiprocessing.get_context("spawn")  # a fork may have no backward pass
        self._answers, theirs = spawning.Pipe()
        given = theirs, load, index, use_data
        self._process = spawning.Process(target=_serve, args=given, name="plan")
        self._process.start()
        theirs.close()  # the end of the process is then the end of the answers
        self._is_unread = False

    def ask(self, choice: Choice) -> Callable[[], list[Measured] | None]:
        """Begin to measure a choice.

        Returns:
            A function that waits for the result, which is None if the choice is refused or the
            process has ended.
        """
        if self._is_unread:  # the first process could not measure its model
            self._answer()
        try:
            self._answers.send(choice)
        except OSError:
            return lambda: None
        self._is_unread = True
        return self._answer

    def _answer(self) -> list[Measured] | None:
        self._is_unread = False
        try:
            found: list[Measured] | None = self._answers.recv()
        except (EOFError, OSError):
            return None
        return found

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._answers.close()


@contextmanager
def second_process(
    load: LoadPlans, index: int, *, use_data: bool
) -> Iterator[SecondProcess | None]:
    """Start a second process until the end of the block.

    Yields None if this process may use one core only, or `load` cannot be sent to another process.
    """
    if num_cores() < 2 or not _can_be_sent(load):
        yield None
        return
    with closing(SecondProcess(load, index, use_data=use_data)) as process:
        yield process


def _can_be_sent(item: Any) -> bool:
    try:
        pickle.dumps(item)
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a function in a function
        return False
    return True


def _serve(asked: Connection, load: LoadPlans, index: int, use_data: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    logging.disable(logging.CRITICAL)  # the first process says the same
    warnings.simplefilter("ignore")
    built = Built()
    with suppress(ConfigError):
        load(Choice.alone().changes())  # imports what measurements take
    while True:
        try:
            choice = asked.recv()
        except EOFError:
            return
        asked.send(_longer(load, index, choice, built, use_data=use_data))


def _longer(
    load: LoadPlans, index: int, choice: Choice, built: Built, *, use_data: bool
) -> list[Measured] | None:
    try:
        with fake_world(choice.mesh.num_devices):
            plan = load(choice.changes())[index]
            return measure_longer(plan, built, use_data=use_data, one_step=True)
    except ConfigError:
        return None
