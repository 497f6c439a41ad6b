"""Everything that is wrong with a configuration, collected and reported together."""

from __future__ import annotations

from dataclasses import dataclass

from modelzoo_trainer.config.positions import Position
from modelzoo_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Args:
        at: Where it stands.
        path: Of what; empty for the file itself.
        message: What was given, what fits, what to do.
    """

    at: Position
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.at), self.path, self.message) if part)


class Problems:
    """The problems found so far, each once, whatever the number of aliases that lead to it."""

    def __init__(self) -> None:
        self._found: dict[tuple[Position, str], Problem] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, at: Position, path: str, message: str) -> None:
        """Note a problem; the same one at the same place counts once.

        Args:
            at: Where it stands.
            path: Of what, from the root of the file.
            message: What was given, what fits, what to do.
        """
        self._found.setdefault((at, message), Problem(at, path, message))

    def lines(self) -> list[str]:
        """Return a line for each problem: those of files by line, then the command line's."""
        found = self._found.values()
        ordered = sorted(found, key=lambda problem: (problem.at.line == 0, problem.at.line))
        return [str(problem) for problem in ordered]

    def raise_if_any(self) -> None:
        """Raise what was found.

        Raises:
            ConfigError: If there is a problem; one line each.
        """
        if self._found:
            raise ConfigError("\n".join(self.lines()))
