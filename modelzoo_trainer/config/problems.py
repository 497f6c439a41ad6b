"""Everything that is wrong with a configuration, collected and reported together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from modelzoo_trainer.config.positions import Position
from modelzoo_trainer.config.secrets import hide_in_text
from modelzoo_trainer.errors import ConfigError

_LONGEST: Final = 300  # characters of a path that are shown
MOST_SHOWN: Final = 100  # problems that are printed
_UNSEEN: Final = {
    code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    at: Position
    path: str  # of what; empty for the file itself
    message: str  # what was given, what fits, what to do

    def __str__(self) -> str:
        parts = (str(self.at), _shown(self.path), self.message)
        return ": ".join(part for part in parts if part)


def _shown(text: str) -> str:
    """Return what a terminal shows of a path, whose keys may be any text."""
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return short.translate(_UNSEEN)


class Problems:
    """The problems found so far, each once, whatever the number of aliases that lead to it.

    `for_a_run`: whether the file is to be run; in a mere check, what is right but cannot run here
    is a note.
    """

    def __init__(self, *, for_a_run: bool = True) -> None:
        self.for_a_run = for_a_run
        self._found: dict[tuple[Position, str], Problem] = {}
        self._noted: dict[tuple[Position, str], Problem] = {}
        self.whole_numbers: dict[int, int] = {}
        """What scalars such as `1e3` and `1_000` were taken for, by their `id`: no problems."""
        self.hide: Callable[[str], str] = hide_in_text
        """Hides the secrets of the file in what is said about it."""
        self.num_added = 0
        """How often a problem was added, the same one at the same place counted each time."""

    def add(self, at: Position, path: str, message: str) -> None:
        """Note a problem; the same one at the same place counts once."""
        self.num_added += 1
        self._found.setdefault((at, message), Problem(at, path, message))

    def add_to_run(self, at: Position, path: str, message: str) -> None:
        """Note what is right in the format, but stands in the way of a run: a problem for that."""
        if self.for_a_run:
            self.add(at, path, message)
        else:
            self.note(at, path, f"cannot run as it is: {message}")

    def note(self, at: Position, path: str, message: str) -> None:
        """Keep what the user should hear once: a setting that has no effect here, for instance."""
        self._noted.setdefault((at, message), Problem(at, path, message))

    def of_one_trainer(self) -> Problems:
        """Return a collection of the same problems, with notes of its own on top of these."""
        other = Problems(for_a_run=self.for_a_run)
        other._found = self._found
        other._noted = dict(self._noted)
        other.hide = self.hide
        return other

    @property
    def notes(self) -> tuple[Problem, ...]:
        """What was noted, by line."""
        noted = _ordered(self._noted)
        return tuple(replace(problem, message=self.hide(problem.message)) for problem in noted)

    def lines(self) -> list[str]:
        """Return a line for each problem: those of files by line, then the command line's."""
        return [self.hide(str(problem)) for problem in _ordered(self._found)]

    def raise_if_any(self) -> None:
        """Raise what was found.

        Raises:
            ConfigError: If there is a problem; one line each for the first 100, then how many
                more there are.
        """
        lines = self.lines()
        num_more = len(lines) - MOST_SHOWN
        if num_more > 0:
            lines[MOST_SHOWN:] = [f"... and {num_more:,} more"]
        if lines:
            raise ConfigError("\n".join(lines))


def _ordered(found: dict[tuple[Position, str], Problem]) -> list[Problem]:
    return sorted(found.values(), key=lambda problem: (problem.at.line == 0, problem.at.line))
