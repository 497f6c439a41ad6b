"""A child's report on how it ended, a JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from modelzoo_trainer.errors import CheckpointMismatch, ConfigError, HookError

_HOPELESS: Final = (CheckpointMismatch, ConfigError, HookError, ImportError, SyntaxError)
_LONGEST: Final = 2000  # characters of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that ended a child."""

    kind: str  # its type's name, with the module
    message: str  # its text, shortened
    step: int | None  # the global step at that time; None = before training
    # whether another attempt may fare better: not if something is to be mended first
    can_heal: bool
    is_config: bool

    @classmethod
    def of(cls, error: BaseException, step: int | None) -> Self:
        """Return the record of an exception."""
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return cls(
            kind=module + kind.__qualname__,
            message=str(error)[:_LONGEST],
            step=step,
            can_heal=not isinstance(error, _HOPELESS),
            is_config=isinstance(error, ConfigError),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a child reports."""

    pid: int = 0
    checkpoint: str | None = None  # the newest that it has committed
    # what ended a trainer before its time, such as "SIGTERM" or "stop file"
    interrupted: str | None = None
    hung: str | None = None  # what its watchdog found
    failure: Failure | None = None

    def write(self, path: Path) -> None:
        """Write it: whole, or not at all.

        Raises:
            OSError: If that fails.
        """
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a child wrote; of one that wrote nothing, that nothing is known."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            failure = raw.pop("failure")
            made = cls(**raw)
            return made if failure is None else replace(made, failure=Failure(**failure))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()


def write_json(path: Path, value: Any) -> None:
    """Write a file whole, or not at all.

    Raises:
        OSError: If that fails.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
