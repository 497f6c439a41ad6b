"""What the processes of a nursery do."""

from __future__ import annotations

import io
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from modelzoo_trainer import checkpointing
from modelzoo_trainer.cli.command import main
from tests.reliability import program
from tests.reliability.disk_calls import WRITES, Call, Counter, Tap, half_of
from tests.reliability.program import Plan
from tests.reliability.scenarios import DEEDS
from tests.reliability.states import make

CRASHED: Final = 77


def warm_up() -> None:
    """Have everything imported that a first step imports."""
    package = logging.getLogger("modelzoo_trainer")
    package.addHandler(silent := logging.NullHandler())
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder=str(Path(folder, "run")), steps=1)
        program.run(plan)
        program.run(replace(plan, steps=2))
        with redirect_stdout(io.StringIO()):
            main(["--params", str(Path(__file__).parent / "params.yaml"), "--check"])
    package.removeHandler(silent)


def train(plan: dict[str, Any]) -> int:
    """Run the training program."""
    return program.run(Plan(**plan))


def command(*words: str) -> int:
    """Run the command line, in a process that is there for nothing else."""
    sys.argv[1:] = words
    return main()


def crash(deed: str, folder: str, at: int) -> int:
    """Do something to a folder, and end like a crash before the n-th call that changes it.

    A write is done by half.
    """

    def end(call: Call, perform: Callable[[], Any]) -> NoReturn:
        if call.name in WRITES:
            half_of(call)
        os._exit(CRASHED)

    with Tap(Path(folder), Counter(at, end)):
        DEEDS[deed](Path(folder))
    return 0


def save_for_ever(folder: str, told: str) -> NoReturn:
    """Write checkpoints, keep the newest two, and tell each when it has been acknowledged."""
    descriptor = os.open(told, os.O_WRONLY | os.O_APPEND)
    for step in itertools.count(1):
        make(Path(folder), step)
        os.write(descriptor, f"{step}\n".encode("ascii"))
        if step > 2:
            checkpointing.delete(Path(folder, f"checkpoint_{step - 2}"))
    raise AssertionError("unreachable")
