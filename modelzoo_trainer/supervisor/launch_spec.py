"""What a supervisor passes to its child, on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

OPTION: Final = "--supervised"
_MISFIT: Final = "is for a supervisor to give, and this is nothing that one gave. Leave it out."


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What a child needs to know."""

    folder: str  # of the supervisor; the child writes its files there
    attempt: int  # from 1
    supervisor: int  # the process that it must not survive
    descriptor: int  # of the shared status
    trainer: int = 0  # the first trainer of the file that is not done yet
    is_restart: bool = False  # whether the run has written a checkpoint before
    checkpoint: str | None = None  # the newest, if known
    # when the first attempt at that trainer began its fit, on the monotonic clock, which all
    # processes share; None = none has
    began: float | None = None

    def to_words(self) -> list[str]:
        """Return it as words of a command line."""
        return [OPTION, json.dumps(asdict(self))]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what the words say.

        Raises:
            ValueError: If a supervisor did not write them.
        """
        try:
            made = cls(**json.loads(text))
        except (ValueError, TypeError):
            raise ValueError(f"{OPTION} {_MISFIT}") from None
        numbers = (made.attempt, made.supervisor, made.descriptor, made.trainer)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{OPTION} {_MISFIT}")
        return made

    @property
    def status(self) -> Path:
        """The file in which the child says what happened to it."""
        return Path(self.folder, f"attempt_{self.attempt}.json")

    @property
    def stacks(self) -> Path:
        """The file for the stacks of a child that crashes in native code, or hangs."""
        return Path(self.folder, f"stacks_{self.attempt}.txt")


def without_launch_spec(words: list[str]) -> list[str]:
    """Return the words of a command line as the user wrote them."""
    if OPTION not in words:
        return words
    at = words.index(OPTION)
    return words[:at] + words[at + 2 :]
