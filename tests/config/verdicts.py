"""What the check says of a file with a mistake, against what it should say, counted."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.errors import ConfigError
from tests.config.mutants import KINDS, MISSPELT, Mutant

COLUMNS = (
    "mutants",
    "open",
    "open, refused",
    "judged",
    "rejected",
    "right line",
    "right name",
    "suggested",
)


@dataclass
class Verdicts:
    """Mutants of one or more files, checked.

    Args:
        folder: For the files that are checked.
        names: What they may name.
        counts: By kind and column.
        missed: The mutants that are not found as they should be, with what was said.
        open_places: How many mutants the format lets pass, by owner.
        unsuggested: Misspelt words with the right ones, where those were not suggested.
        crashes: What raised something else than a `ConfigError`.
        slowest: The check that took the longest.
        seconds: All checks together.
    """

    folder: Path
    names: Names
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    open_places: Counter[str] = field(default_factory=Counter)
    unsuggested: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    seconds: float = 0.0

    def problems(self, text: str, what: str = "") -> list[tuple[int, str]]:
        """Return what is wrong with a file that is to be run: line and message."""
        path = self.folder / "f.yaml"
        path.write_text(text, encoding="utf-8")
        start = time.perf_counter()
        try:
            load_plans(path, lambda: self.names, mode=None)
        except ConfigError as error:
            found = str(error).split(f"{path}:")[1:]
        except Exception as error:  # noqa: BLE001  # a fault of the check, whatever it is
            found = []
            self.crashes.append(f"{what}: {type(error).__name__}: {error}")
        else:
            found = []
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.slowest = max(self.slowest, (seconds, what))
        return [(int(line), text.strip()) for line, text in (_split(one) for one in found)]

    def judge(self, source: str, text: str, mutants: Iterable[Mutant]) -> None:
        """Check the mutants of a file, and count.

        Args:
            source: What the file is called here.
            text: As it was.
            mutants: Of it.
        """
        before = self.problems(text, source)
        for mutant in mutants:
            self._judge(source, before, mutant)

    def _judge(self, source: str, before: list[tuple[int, str]], mutant: Mutant) -> None:
        what = f"{source} {mutant.path} {mutant.kind} {mutant.way}".rstrip()
        first, by = mutant.moved
        old = {(line + by if line >= first else line, message) for line, message in before}
        new = [one for one in self.problems(mutant.text, what) if one not in old]
        self._count(mutant, "mutants")
        if mutant.is_open:
            self._count(mutant, "open")
            self.open_places[mutant.owner] += 1
            self._count(mutant, "open, refused", bool(new))
            return
        self._count(mutant, "judged")
        in_line = [message for line, message in new if line == mutant.line]
        named = [message for message in in_line if _names(message, mutant.word)]
        self._count(mutant, "rejected", bool(new))
        self._count(mutant, "right line", bool(in_line))
        self._count(mutant, "right name", bool(named))
        if mutant.kind == MISSPELT:
            advice = f"did you mean '{mutant.key.lower()}'?"  # classes are known in any case
            suggested = any(advice in message.lower() for message in named)
            self._count(mutant, "suggested", suggested)
            if not suggested:
                self.unsuggested[f"{mutant.word} for {mutant.key}"] += 1
        if not named:
            self.missed.append(f"{what} ({mutant.word} in line {mutant.line}): {new}")

    def share(self, column: str) -> float:
        """Return how many of the judged misspellings count in a column, from 0 to 1."""
        return self.counts[MISSPELT, column] / self.counts[MISSPELT, "judged"]

    def _count(self, mutant: Mutant, column: str, number: int = 1) -> None:
        self.counts[mutant.kind, column] += number

    def table(self) -> str:
        """Return the counts, a line for each kind."""
        head = f"{'':12}" + "".join(f"{column:>14}" for column in COLUMNS)
        rows = [head]
        for kind in (*KINDS, "all"):
            numbers = [
                sum(self.counts[one, column] for one in (KINDS if kind == "all" else [kind]))
                for column in COLUMNS
            ]
            rows.append(f"{kind:12}" + "".join(f"{number:14}" for number in numbers))
        return "\n".join(rows)


def _split(text: str) -> tuple[str, str]:
    line, _, message = text.partition(":")
    return line, message.partition(": ")[2]


def _names(message: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) is not None
