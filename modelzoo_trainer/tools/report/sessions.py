"""The folders `logs/<time>` of a run, one per trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import open_regular, read_bytes
from modelzoo_trainer.base.secrets import hide_in_text, without_secrets
from modelzoo_trainer.tools.report.run_log import LoggedMessage, read_log

EVENTS: Final = "events.jsonl"
FACTS: Final = "run.json"
PARAMS: Final = "params.yaml"
MAX_SETTINGS: Final = 5000
_VALIDATION: Final = "validate"  # the kind of a call
_TEXT_ENDINGS: Final = (".txt",)
IMAGE_KINDS: Final = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".gif": "gif",
    ".webp": "webp",
}
_NO_SAMPLES: Final = re.compile(r"stacks.*\.txt")
_MAX_SAMPLES: Final = 40  # of one session
_MAX_TEXT_BYTES: Final = 20_000
_HEAD: Final = re.compile(r"# (command|versions|git commit|note): (.*)")


@dataclass(frozen=True, slots=True)
class Event:
    """A line of `events.jsonl`."""

    kind: str
    time: float
    step: float
    facts: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        """Return a fact if it is a number."""
        value = self.facts.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value)


@dataclass(frozen=True, slots=True)
class Sample:
    """A text or an image written by a callback."""

    title: str
    text: str | None = None
    image: Path | None = None
    inside: Path | None = None
    """The folder of the run of an image."""


@dataclass(slots=True)
class LogSession:
    """The content of one folder of logs."""

    path: Path
    """`logs/<time>` in the folder of the run."""
    events: list[Event] = field(default_factory=list)
    num_broken: int = 0
    """Unreadable lines of `events.jsonl`, except the last one."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings in `params.yaml`, if there is one."""
    resolved: dict[str, str] = field(default_factory=dict)
    """Settings in `run.json`: named as in Python, with defaults."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Of the data, named as settings."""
    overridden: list[str] = field(default_factory=list)
    """Settings of optimizers that a schedule replaces, by their paths as in Python."""
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    warnings: list[LoggedMessage] = field(default_factory=list)
    stopped_by: str = ""
    """According to `run.log`."""

    @property
    def run_dir(self) -> Path:
        """The folder of the run; links that lead out of it are not followed."""
        return self.path.parent.parent

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def is_finished(self) -> bool:
        """Whether its last call finished."""
        ends = self.of("end")
        return bool(ends) and ends[-1].facts.get("outcome") == "finished"

    @property
    def has_fit(self) -> bool:
        """Whether `fit` was called."""
        return any(one.facts.get("kind") != _VALIDATION for one in self.of("start", "train_start"))

    @property
    def first_step(self) -> float | None:
        """The step at which training started; None = no training."""
        starts = self.of("train_start")
        return starts[0].step if starts else None


def training_calls(sessions: Iterable[LogSession]) -> list[LogSession]:
    """Return the events of each call of `fit`, as sessions; of all calls if none trained.

    A later validation says nothing about the training.
    """
    calls: list[LogSession] = []
    for session in sessions:
        for event in session.events:
            if event.kind == "start" or not calls or calls[-1].path != session.path:
                calls.append(LogSession(session.path))
            calls[-1].events.append(event)
    fits = [call for call in calls if call.events[0].facts.get("kind") != _VALIDATION]
    return fits or calls


def fits_or_all(sessions: Sequence[LogSession]) -> list[LogSession]:
    """Return the sessions with a call of `fit`; all if there is none."""
    return [session for session in sessions if session.has_fit] or list(sessions)


def read_sessions(run_dir: Path) -> list[LogSession]:
    """Return the sessions of a run, the oldest first."""
    logs = run_dir / "logs"
    try:
        folders = [path for path in logs.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    found = [_read(folder) for folder in folders]
    return sorted(found, key=lambda session: (_began(session), session.path.name))


def of_this_run(sessions: Sequence[LogSession]) -> list[LogSession]:
    """Return the sessions since training started at step 0; earlier ones are other runs."""
    begins = [idx for idx, session in enumerate(sessions) if session.first_step == 0]
    return list(sessions[begins[-1] :]) if begins else list(sessions)


def _began(session: LogSession) -> float:
    if session.events:
        return session.events[0].time
    match = re.match(r"\d{8}_\d{6}", session.path.name)
    try:
        return datetime.strptime(match[0], "%Y%m%d_%H%M%S").timestamp() if match else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _read(folder: Path) -> LogSession:
    session = LogSession(folder)
    _read_events(session)
    _read_facts(session)
    _read_params(session)
    session.warnings, session.stopped_by = read_log(folder, session.run_dir)
    return session


def _text_of(path: Path, session: LogSession) -> str | None:
    """Return the content of a file; None if there is none."""
    try:
        return read_bytes(path, inside=session.run_dir).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        session.problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return None


def _read_events(session: LogSession) -> None:
    text = _text_of(session.path / EVENTS, session) or ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            when, step = float(record["time"]), float(record["step"])
            event = Event(str(record["event"]), when, step, record)
            session.events.append(event)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            session.num_broken += number < len(lines)
    session.events.sort(key=lambda event: event.time)


def _read_facts(session: LogSession) -> None:
    text = _text_of(session.path / FACTS, session)
    if text is None:
        return
    try:
        facts = json.loads(text)
        environment, settings = facts["environment"], facts.get("settings")
        model = facts.get("model", {})
        session.environment = {str(key): _shown(value) for key, value in environment.items()}
        session.environment |= {f"model {key}": _shown(value) for key, value in model.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        session.problems.append(f"{FACTS} cannot be read")
        return
    sizes = facts.get("sizes")
    session.sizes = flattened(sizes) if isinstance(sizes, dict) and sizes else {}
    session.overridden = _texts_in(facts.get("overridden"))
    hints = facts.get("hints")
    session.hints = [hide_in_text(one) for one in _texts_in(hints)]
    if isinstance(settings, dict):
        session.settings = session.resolved = flattened(without_secrets(settings))


def _texts_in(found: Any) -> list[str]:
    return [str(one) for one in found] if isinstance(found, list) else []


def _read_params(session: LogSession) -> None:
    text = _text_of(session.path / PARAMS, session)
    if text is None:
        return
    from modelzoo_trainer.config.loader import read_text
    from modelzoo_trainer.config.positions import to_plain
    from modelzoo_trainer.errors import ConfigError

    for line in text.splitlines():
        match = _HEAD.match(line)
        if match is not None:
            session.environment[match[1]] = hide_in_text(match[2])
    try:
        plain = to_plain(read_text(text, PARAMS))
    except (ConfigError, RecursionError):
        session.problems.append(f"{PARAMS} is not valid YAML")
        return
    session.settings = flattened(without_secrets(plain))


def flattened(plain: Any, path: str = "") -> dict[str, str]:
    """Return the leaves of nested mappings and lists by their paths."""
    found: dict[str, str] = {}
    for key, value in _leaves(plain, path):
        if len(found) >= MAX_SETTINGS:
            break
        found[key] = value
    return found


def _leaves(plain: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(plain, list) and any(isinstance(item, (dict, list)) for item in plain):
        for idx, item in enumerate(plain):
            yield from _leaves(item, f"{path}[{idx}]")
    else:
        yield path, _shown(plain)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u2009") if abs(value) >= 100_000 else str(value)
    return hide_in_text(str(value))


def samples_of(session: LogSession) -> list[Sample]:
    """Return the texts and images in a session's folder."""
    found: list[Sample] = []
    try:
        paths = sorted(path for path in session.path.rglob("*") if path.is_file())
    except OSError:
        return []
    for path in paths:
        title = f"{session.path.name}/{path.relative_to(session.path).as_posix()}"
        if path.suffix.lower() in IMAGE_KINDS:
            found.append(Sample(title, image=path, inside=session.run_dir))
        elif path.suffix in _TEXT_ENDINGS and not _NO_SAMPLES.fullmatch(path.name):
            found.append(Sample(title, text=_beginning(path, session.run_dir)))
    return found[-_MAX_SAMPLES:]


def _beginning(path: Path, run_dir: Path) -> str:
    try:
        with open_regular(path, inside=run_dir) as file:
            text = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        return f"(cannot be read: {error.strerror or error})"
    shown = text[:_MAX_TEXT_BYTES].decode(errors="replace")
    return hide_in_text(shown) + (" ..." if len(text) > _MAX_TEXT_BYTES else "")
