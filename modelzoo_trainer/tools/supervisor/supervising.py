"""The supervisor: runs a command as its child and restarts it after failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.exit_codes import FAILED
from modelzoo_trainer.errors import unusable
from modelzoo_trainer.tools.supervisor.goodput import Attempt, Goodput
from modelzoo_trainer.tools.supervisor.outcome import (
    FAILURES,
    Decision,
    Ending,
    Outcome,
    Policy,
    classify,
)
from modelzoo_trainer.tools.supervisor.process import Process, Stops
from modelzoo_trainer.tools.supervisor.protocol import (
    UNKNOWN,
    ChildReport,
    LaunchSpec,
    SharedStatus,
    known,
    write_json,
)
from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings

FOLDER: Final = "restarts"
GOODPUT: Final = "ledger.json"


def supervise(
    command: Sequence[str],
    settings: Sequence[SupervisorSettings],
    report: Callable[[str], None],
    *,
    shown: Sequence[str] | None = None,
) -> int:
    """Run a command as a child, restart it after failures, and return the exit code.

    SIGINT, SIGTERM and SIGUSR1 are forwarded once each; sending the same one again kills the
    child. The child's output goes to this process's stdout and stderr.

    `shown`: the command as the goodput file shows it; None = `command`.

    Raises:
        ConfigError: If the folder cannot be created.
    """
    stops = Stops()
    with stops.listening():
        return _Supervision(command, settings, report, stops, shown or command).run()


class _Supervision:
    def __init__(
        self,
        command: Sequence[str],
        settings: Sequence[SupervisorSettings],
        report: Callable[[str], None],
        stops: Stops,
        shown: Sequence[str],
    ) -> None:
        self._command = command
        self._settings = settings
        self._print = report
        self._stops = stops
        self._ended_at = time.monotonic()
        self._goodput = Goodput(shown, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        self._policy = Policy()
        self._parent = settings[0].model_dir
        self._parent_is_new = not self._parent.exists()
        self._folder = _make_folder(self._parent / FOLDER)
        self._has_warned = False
        self._spec = LaunchSpec(
            folder=str(self._folder), attempt=0, supervisor=os.getpid(), descriptor=-1
        )
        """The launch spec of the next child."""

    def run(self) -> int:
        while True:
            attempt = self._attempt()
            ending = attempt.ending
            if ending.outcome is Outcome.INVALID_CONFIG and self._never_started(attempt):
                self._discard()
                return ending.exit_code
            budget = self._current_settings.max_num_restarts
            decision = self._policy.decide(ending, attempt.start, attempt.progress, budget)
            again = decision.is_again and not self._stops.is_asked
            self._report(attempt, decision, again=again)
            if not decision.is_again:
                return self._end(ending)
            self._stops.pause(decision.pause_s)
            if self._stops.is_asked:
                return self._end(
                    classify(FAILED, ChildReport(), passed_on=tuple(self._stops.received))
                )

    @property
    def _current_settings(self) -> SupervisorSettings:
        return self._settings[min(self._spec.trainer, len(self._settings) - 1)]

    def _attempt(self) -> Attempt:
        """Run one child to its end."""
        settings = self._current_settings
        shared = SharedStatus.create()
        started_at = shared.since
        try:
            shared.trainer = shared.num_done = self._spec.trainer
            number = len(self._goodput.attempts) + 1
            spec = replace(self._spec, attempt=number, descriptor=shared.descriptor)
            process = Process([*self._command, *spec.to_words()], shared, self._stops)
            code = process.wait(settings)
            shared.end()
        finally:
            shared.close()
        report = ChildReport.read(spec.report)
        ending = classify(
            code,
            report,
            passed_on=tuple(self._stops.received),
            hung=process.hung or (report.hung or "no progress" if shared.is_hung else None),
            is_cut=shared.step != UNKNOWN and shared.num_done < len(self._settings),
        )
        down_s = started_at - self._ended_at
        final = SharedStatus.from_buffer_copy(shared)  # the mapped one keeps its descriptor open
        attempt = Attempt(number=number, down_s=down_s, shared=final, ending=ending)
        self._ended_at = final.since
        self._learn(attempt, report)
        with suppress(OSError):
            if spec.stacks.stat().st_size == 0:
                spec.stacks.unlink()
        self._goodput.attempts.append(attempt)
        self._write_goodput()
        return attempt

    def _learn(self, attempt: Attempt, report: ChildReport) -> None:
        """Update the launch spec of the next child."""
        shared, spec = attempt.shared, self._spec
        if shared.num_done != spec.trainer:
            done = int(shared.num_done)
            spec = replace(spec, trainer=done, is_restart=False, checkpoint=None, began=None)
        if not attempt.is_between:
            if spec.began is None and shared.began != UNKNOWN:
                spec = replace(spec, began=shared.began)
            if shared.saved_step != UNKNOWN:
                spec = replace(spec, is_restart=True, checkpoint=report.checkpoint)
        self._spec = spec

    def _report(self, attempt: Attempt, decision: Decision, *, again: bool) -> None:
        ending, step = attempt.ending, known(attempt.shared.step)
        if ending.outcome not in FAILURES and ending.outcome is not Outcome.NOT_RETRYABLE:
            return
        at = "before the first step" if step is None else f"at step {step}"
        text = f"Attempt {attempt.number} failed {at}: {ending.cause}."
        if again:
            after = f" in {decision.pause_s:.0f} s" if decision.pause_s else ""
            source = "the newest checkpoint" if self._spec.is_restart else "the start"
            text += f" Restarting{after} from {source}; {decision.reason}."
        elif not self._stops.is_asked:
            text += f" Not restarting: {decision.reason or 'this error is not retryable'}."
        self._print(text)

    def _end(self, ending: Ending) -> int:
        self._print(f"{self._goodput.summary()}. See {self._folder / GOODPUT}.")
        return ending.exit_code

    def _write_goodput(self) -> None:
        path = self._folder / GOODPUT
        try:
            write_json(path, self._goodput.to_dict())
        except OSError as error:
            if not self._has_warned:
                self._print(f"failed to write {path}: {error.strerror or error}.")
            self._has_warned = True

    @staticmethod
    def _never_started(attempt: Attempt) -> bool:
        shared = attempt.shared
        return attempt.number == 1 and shared.start_step == UNKNOWN and not shared.num_done

    def _discard(self) -> None:
        """Delete the folder of a run that never started."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()
            if self._parent_is_new:
                self._parent.rmdir()


def _make_folder(parent: Path) -> Path:
    """Create a new folder named after the current time."""
    name = time.strftime("%Y%m%d_%H%M%S")
    number = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / (name if number == 1 else f"{name}_{number}")
            try:
                folder.mkdir()
            except FileExistsError:  # another run started in the same second
                number += 1
            else:
                return folder.absolute()
    except OSError as error:
        raise unusable("model_dir", parent.parent, error) from None
