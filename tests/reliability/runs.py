"""Runs of the training program, unbroken ones to compare with, and what they said."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.reliability.forkserver import Child, Ended, Nursery
from tests.reliability.program import EVENTS, RESULT

TRAIN: Final = "forkserver_tasks:train"
PARAMS: Final = Path(__file__).with_name("params.yaml")
_MAX_ATTEMPTS: Final = 400


@dataclass(slots=True)
class Attempt:
    """What one process of a run said.

    Args:
        begin: The step that a run with snapshots in memory loaded; None = it did not come to that.
        start: The step at which it began to train; None = it did not come to that.
        batches: The loss and a digest of the weights, by number of the forward.
        saved: The steps of the checkpoints that were acknowledged.
        validated: The steps of validations that ended.
        stopped: The step at which its fit ended in order.
    """

    begin: int | None = None
    start: int | None = None
    batches: dict[int, str] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    stopped: int | None = None


class Run:
    """A folder in which the program is run until it is done.

    Args:
        nursery: Where its processes come from.
        place: Its folder.
        changes: Of the plan.
    """

    def __init__(self, nursery: Nursery, place: Path, changes: dict[str, Any]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.nursery = nursery
        self.place = place
        self.folder = place / "run"
        self.changes = changes
        self.ends: list[Ended] = []
        self.attempts: list[Attempt] = []
        self._read_to = 0

    def start(self, **changes: Any) -> Child:
        """Start a process of it; `end` takes its end."""
        if "params" in self.changes:
            return self._start_command()
        plan = {"folder": str(self.folder), "beside": str(self.place)} | self.changes | changes
        return self.nursery.start(TRAIN, plan)

    def _start_command(self) -> Child:
        """Start the command line; `params` of the plan is a list of changes of the file."""
        given = [f"trainer.init.model_dir={self.folder}"]
        given.append(f"init.callbacks[tests.reliability.parts.Events].path={self.place / EVENTS}")
        words = [word for change in given + self.changes["params"] for word in ("--set", change)]
        return self.nursery.start("forkserver_tasks:command", "--params", str(PARAMS), *words)

    def end(self, ended: Ended) -> Ended:
        """Note how a process ended and what it said."""
        self.ends.append(ended)
        self.attempts.append(self._heard())
        return ended

    def once(self, **changes: Any) -> Ended:
        """Run it once."""
        return self.end(self.start(**changes).wait())

    def killed_after(self, seconds: float, number: int = signal.SIGKILL, **changes: Any) -> Ended:
        """Run it, and send it a signal after so long."""
        return self.end(self.start(**changes).kill_after(seconds, number))

    def num_told(self, word: str) -> int:
        """Return how many lines its processes have written so far that begin with a word."""
        path = self.place / EVENTS
        text = path.read_text(encoding="ascii") if path.exists() else ""
        return sum(line.startswith(f"{word} ") for line in text.splitlines())

    def wait_for(self, child: Child, word: str, already: int = 0) -> None:
        """Wait until one more such line is written.

        Raises:
            AssertionError: If the process ends before.
        """
        while self.num_told(word) <= already:
            has_ended = child.has_ended(0.005)
            assert not has_ended or self.num_told(word) > already, self.nursery.said()[-3000:]

    def _heard(self) -> Attempt:
        path = self.place / EVENTS
        text = path.read_text(encoding="ascii") if path.exists() else ""
        new, self._read_to = text[self._read_to :], len(text)
        attempt = Attempt()
        for word, *rest in map(str.split, new.splitlines()):
            if word == "begin":
                attempt.begin = int(rest[0])
            elif word == "start":
                attempt.start = int(rest[0]) if attempt.start is None else attempt.start
            elif word == "batch":
                attempt.batches[int(rest[0])] = " ".join(rest[1:])
            elif word == "saved":
                attempt.saved.append(step_of(rest[1]))
            elif word == "validated":
                attempt.validated.append(int(rest[0]))
            else:
                attempt.stopped = int(rest[0])
        return attempt

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out of it; None if it has not finished."""
        path = self.place / RESULT
        return json.loads(path.read_text(encoding="ascii")) if path.exists() else None

    def num_ended_by(self, code: int) -> int:
        """Return how many of its processes ended with a code."""
        return sum(ended.code == code for ended in self.ends)

    @property
    def num_batches(self) -> int:
        """How many batches have been trained on, those that were repeated counted once."""
        return max((max(attempt.batches, default=0) for attempt in self.attempts), default=0)

    @property
    def seconds(self) -> float:
        """How long its first process lived."""
        return self.ends[0].seconds

    # ---- what has to hold

    def num_lost(self) -> int:
        """Return how many attempts began before a checkpoint that had been acknowledged."""
        newest = lost = 0
        for attempt in self.attempts:
            if attempt.start is not None and attempt.start < newest:
                lost += 1
            newest = max([newest, *attempt.saved])
        return lost

    def num_compared(self) -> int:
        """Return how many batches were trained on, those that were repeated counted again."""
        return sum(len(attempt.batches) for attempt in self.attempts)

    def differing(self, unbroken: Run) -> list[int]:
        """Return the batches that did not give what they give in the unbroken run."""
        expected = unbroken.attempts[0].batches
        return [
            number
            for attempt in self.attempts
            for number, said in attempt.batches.items()
            if expected.get(number) != said
        ]

    def unequal(self, unbroken: Run) -> list[str]:
        """Return what came out otherwise than in the unbroken run: weights, metrics, ..."""
        if self.result is None or unbroken.result is None:
            return ["everything"]
        return [name for name, value in unbroken.result.items() if self.result[name] != value]

    def leftovers(self) -> list[str]:
        """Return what is in the folder that begins with a dot and is no lock."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir()]
        return sorted(name for name in names if name.startswith((".tmp-", ".trash-")))


class Runs:
    """Makes runs of a test.

    Args:
        nursery: Where their processes come from.
        folder: Where they are.
        unbroken: Those to compare with, of all tests, by plan.
    """

    def __init__(self, nursery: Nursery, folder: Path, unbroken: dict[str, Run]) -> None:
        self.nursery = nursery
        self.folder = folder
        self._unbroken = unbroken
        self._num = 0

    def new(self, **changes: Any) -> Run:
        """Return a run with an empty folder of its own."""
        self._num += 1
        return Run(self.nursery, self.folder / f"run-{self._num}", changes)

    def unbroken(self, **changes: Any) -> Run:
        """Return a run of the same plan that nobody stopped."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self._unbroken:
            made = self.new(**changes)
            ended = made.once()
            assert ended.code == 0, self.nursery.said()[-3000:]
            self._unbroken[key] = made
        return self._unbroken[key]


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name: checkpoint_12, or checkpoint_12_2."""
    return int(name.split("_")[1])


def instants(seed: int | str, longest_s: float) -> Iterator[float]:
    """Yield random times up to one, so that a process is killed anywhere in its life.

    The longest grows, slowly: a machine that has become slower than when it was measured would let
    no process come to its first checkpoint.
    """
    generator = random.Random(seed)
    for attempt in range(_MAX_ATTEMPTS):
        yield generator.uniform(0, longest_s * (1 + attempt / 20))
