"""One input through the whole loader, and what may come out of it: plans, or places."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.errors import ConfigError

PATIENCE_S = 20  # of CPU time, for one input; nothing written by hand takes a tenth of it

_PLACE = re.compile(r"f\.yaml(:\d+:\d+)?: \s*\S")


class TookTooLongError(BaseException):
    """An input is not read in `PATIENCE_S`; no handler of the loader's may catch it."""


@dataclass
class Attempts:
    """Inputs, loaded one after the other.

    Args:
        folder: For the file.
        names: What it may name.
        outcomes: How many were "planned" or "refused".
    """

    folder: Path
    names: Names
    outcomes: Counter[str] = field(default_factory=Counter)

    def load(
        self,
        content: str | bytes,
        *,
        mode: str | None = None,
        for_a_run: bool = False,
        changes: Iterable[str] = (),
    ) -> list[str]:
        """Return the lines of the refusal of a file, which begins with a place; none if none.

        Args:
            content: Of the file.
            mode: As of `load_plans`.
            for_a_run: As of `load_plans`.
            changes: As of `load_plans`; a problem with one of them has that as its place.
        """
        path = self.folder / "f.yaml"
        path.write_bytes(content if isinstance(content, bytes) else _encoded(content))
        lines = self._refusal(
            load_plans,
            path,
            lambda: self.names,
            mode=mode,
            changes=changes,
            for_a_run=for_a_run,
        )
        text = "\n".join(lines).replace(f"{path}", "f.yaml")
        options = tuple(f"--set {change}: " for change in changes)
        assert not text or _PLACE.match(text) or text.startswith(options), text
        return text.split("\n") if text else []

    def call(self, function: Callable[..., Any], *args: Any) -> list[str]:
        """Return the lines of the `ConfigError` that `function` raises; none if it raises none."""
        return self._refusal(function, *args)

    def _refusal(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        message = None
        with patience():
            try:
                function(*args, **kwargs)
            except ConfigError as error:
                message = str(error)
        self.outcomes["planned" if message is None else "refused"] += 1
        assert message != ""
        return [] if message is None else message.split("\n")


@contextmanager
def patience() -> Iterator[None]:
    """Raise `TookTooLongError` in the block when it computes for more than `PATIENCE_S`."""

    def stop(number: int, frame: object) -> None:
        raise TookTooLongError(f"not done after {PATIENCE_S} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
