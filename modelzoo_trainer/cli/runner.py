"""Run the plans of a file one after another and return an exit code."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelzoo_trainer.base.exit_codes import DONE, FAILED, INTERRUPTED, WRONG_USE, exit_code
from modelzoo_trainer.base.secrets import hide_in_text
from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.cli.distributed_run import Report, job_requeues, report_alone, was_restarted
from modelzoo_trainer.cli.signals import ProcessPhase, StopRequests
from modelzoo_trainer.errors import ConfigError, ModelZooError, long_name

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import StopRecord, World
    from modelzoo_trainer.config.plan import TrainerPlan
    from modelzoo_trainer.tools.supervisor.child import Child


class Runner:
    """Builds and runs trainers; exceptions of users' code are raised with their traceback.

    `child`: reports to a supervisor; None = none. `scratch`: folder for a run that only compiles
    graphs, in place of `model_dir`; their number is printed. None = a normal run.
    """

    def __init__(
        self,
        command: Sequence[str],
        requests: StopRequests,
        child: Child | None = None,
        *,
        scratch: Path | None = None,
    ) -> None:
        self.report: Report = report_alone
        """Prints why the run ends and returns the exit code."""
        self.processes: World | None = None
        """The processes of a distributed run; None = a single process."""
        self.notes: Sequence[str] = ()
        """Printed before the first trainer."""
        self.command = command
        self.requests = requests
        """Receives signals while no trainer does."""
        self._child = child
        self._scratch = scratch
        self._stops: StopRecord | None = None

    def run(self, plans: Sequence[TrainerPlan]) -> int:
        """Run the trainers until one stops early, and return the exit code."""
        stopped = self._stopped_before()
        if stopped is not None:
            return exit_code(stopped)
        self._check_plans(plans)
        done = 0 if self._child is None else self._child.spec.trainer
        for number, plan in enumerate(plans[done:], done):
            if self.requests.received is not None:
                return exit_code(self.requests.received)
            if self._scratch is not None:
                self._use_scratch(plan, self._scratch / str(number))
            code = self._run(number, plan)
            if code != DONE:
                return code
        return DONE

    @staticmethod
    def _use_scratch(plan: TrainerPlan, folder: Path) -> None:
        """Have a trainer that is only to compile graphs write nothing elsewhere."""
        from modelzoo_trainer.config.plan import METHODS

        plan.init["model_dir"] = str(folder)
        plan.call.pop("output_dir", None)
        if plan.method is not None and plan.method != "fit":  # any weights will do
            plan.call.setdefault(METHODS[plan.method].ckpt, None)

    def _stopped_before(self) -> str | None:
        """Return what stopped the run before torchrun restarted it; None if nothing."""
        from modelzoo_trainer.base.devices import BackendError, StopRecord

        try:
            self._stops = StopRecord(self.processes)
        except BackendError as error:
            raise ConfigError(str(error)) from None
        stopped = self._stops.find()
        if stopped is not None and (self.processes is None or self.processes.rank == 0):
            say(
                f"torchrun restarted a run that was stopped on purpose ({stopped}); exiting. To "
                f"resume, start torchrun again."
            )
        return stopped

    def _check_plans(self, plans: Sequence[TrainerPlan]) -> None:
        """Check that all processes have the same configuration.

        Raises:
            ConfigError: If they do not.
        """
        if self.processes is None:
            return
        from modelzoo_trainer.base.devices import BackendError
        from modelzoo_trainer.base.secrets import without_secrets
        from modelzoo_trainer.config.loader import to_yaml

        texts = [f"mode: {plan.mode}\n{to_yaml(without_secrets(plan.resolved))}" for plan in plans]
        try:
            self.processes.require_same(
                "configuration",
                "".join(texts),
                hint="Start all processes with the same file and options.",
            )
        except BackendError as error:
            raise ConfigError(str(error)) from None

    def _run(self, number: int, plan: TrainerPlan) -> int:
        from modelzoo_trainer.base.devices import (
            BackendError,
            BackendUnavailable,
            UnsplittableBatch,
        )
        from modelzoo_trainer.core.artifact_dir import remove_unused

        self._say_notes(plan)
        self.requests.set_phase(ProcessPhase.STARTING)
        try:
            trainer = plan.build()
            self._save_params(plan, trainer)
        except (ConfigError, BackendUnavailable) as error:
            return self.report(str(error), WRONG_USE)
        except (ModelZooError, BackendError) as error:
            return self._fail(error)
        try:
            self._run_trainer(number, plan, trainer)
        except (ConfigError, UnsplittableBatch) as error:  # found only with the data or the model
            remove_unused(trainer)
            return self.report(str(error), WRONG_USE)
        except (ModelZooError, BackendError) as error:
            return self._fail(error)
        except OSError as error:
            if error.errno is None:  # not the operating system's
                raise
            if error.errno == errno.ENAMETOOLONG:
                return self.report(describe(error), WRONG_USE)
            return self._fail(error)
        finally:
            self.requests.set_phase(ProcessPhase.ENDING)
            trainer.close()
        return self._code(trainer)

    def _say_notes(self, plan: TrainerPlan) -> None:
        if self.processes is None or self.processes.rank == 0:
            for note in (*self.notes, *plan.notes):
                say(f"note: {note}")
        self.notes = ()

    def _code(self, trainer: Any) -> int:
        """Return the exit code of a trainer; a signal that was too late for it stops the next."""
        stopped_by = trainer.interrupted or trainer.late_signal
        self.requests.received = self.requests.received or stopped_by
        if trainer.interrupted is None:
            return DONE
        if self._stops is not None:
            self._stops.leave(trainer.interrupted)
        return exit_code(trainer.interrupted)

    def _run_trainer(self, number: int, plan: TrainerPlan, trainer: Any) -> None:
        if self._child is not None:
            self._child.begin_trainer(number, trainer.autorestart)
        if was_restarted(self.processes):
            trainer.autorestart.resume_run()
        if num := job_requeues():
            from modelzoo_trainer.cli.requeues import RequeueLimit

            trainer.add_callback(RequeueLimit(num))

        def phase() -> ProcessPhase:
            is_before_fit = plan.method == "fit" and not trainer.data.num_batches
            return ProcessPhase.STARTING if is_before_fit else ProcessPhase.RUNNING

        self.requests.set_phase(phase)
        trainer.raise_on_interrupt = False  # it is an exit code here
        begin = time.perf_counter()
        plan.run(trainer)
        self.requests.set_phase(ProcessPhase.ENDING)
        if self._scratch is not None:
            _report_compilations(trainer, time.perf_counter() - begin)
        if self._child is not None:
            self._child.end_trainer(number, trainer.interrupted)

    def _save_params(self, plan: TrainerPlan, trainer: Any) -> None:
        """Write the configuration with its overrides beside the run's log."""
        from modelzoo_trainer.config.provenance import describe_run
        from modelzoo_trainer.core.artifact_dir import PARAMS

        if not trainer.backend.comm.is_main:
            return
        path = trainer.artifact_dir / PARAMS
        try:
            path.write_text(describe_run(plan, self.command), encoding="utf-8")
        except OSError as error:
            say(f"Cannot write {path}: {error.strerror or error}. Training continues.")

    def _fail(self, error: Exception) -> int:
        if self._child is not None:
            self._child.fail(error)
        return self.report(describe(error), FAILED)


def _report_compilations(trainer: Any, seconds: float) -> None:
    num = trainer.backend.counters().get("compilations")
    if num is None:
        say(f"No graphs to compile on device {trainer.backend.device}.")
    else:
        say(f"Compiled graphs: {num} ({seconds:.1f} s, including the first steps).")


def answered(act: Callable[[], int]) -> int:
    """Return the exit code of what a command does; errors and Ctrl-C end it with a message."""
    try:
        return act()
    except ConfigError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse_path(error) if error.errno == errno.ENAMETOOLONG else fail(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def refuse_path(error: OSError) -> int:
    """Print that a name is too long, and return the exit code; other errors are raised.

    Any path that a file or an option gives may be, and most functions that ask the system for it
    raise.
    """
    if error.errno != errno.ENAMETOOLONG:
        raise error
    return refuse(describe(error))


def refuse(message: str) -> int:
    """Print why the command or the file is invalid, and return the exit code."""
    say(hide_in_text(message))
    return WRONG_USE


def fail(error: BaseException) -> int:
    """Print in one line why a run failed, and return the exit code."""
    say(describe(error))
    return FAILED


def describe(error: BaseException) -> str:
    """Return an error in one line, with its notes; a name that is too long is not repeated."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"A path is too long: {long_name(Path(str(error.filename or '')))}."
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return hide_in_text(f"{type(error).__name__}: {error}{notes}")
