"""The command line: `modelzoo-trainer fit params.yaml`, `python run.py --params params.yaml`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from modelzoo_trainer.base.exit_codes import INTERRUPTED
from modelzoo_trainer.base.sibling import require_sibling
from modelzoo_trainer.base.stderr import open_missing_streams, say
from modelzoo_trainer.cli import inspecting
from modelzoo_trainer.cli.distributed_run import (
    Report,
    end_with_launcher,
    is_distributed,
    run_distributed,
)
from modelzoo_trainer.cli.parser import PROG, command_parser, parse
from modelzoo_trainer.cli.plans import (
    MakeNames,
    load_plans,
    modules_of_the_user,
    overrides,
    shipped_names,
)
from modelzoo_trainer.cli.runner import Runner, answered, fail, refuse, refuse_path
from modelzoo_trainer.cli.signals import ProcessPhase, StopRequests
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import World
    from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings

# by --compile-only
_UNUSED: Final = ("checkpoint=null", "loggers=[]", "autorestart=null", "progress=none")
_INSPECT: Final = {
    "check": inspecting.check,
    "plan": inspecting.plan,
    "schema": inspecting.schema,
}


def main(argv: Sequence[str] | None = None, *, names: MakeNames | None = None) -> int:
    """Run a command and return the exit code.

    Args:
        argv: The words after the program's name; None = this process's.
        names: Makes the names that a file may use, given the modules of `--import`; None = all
            that are shipped.
    """
    if argv is None:
        open_missing_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["checkpoint"]:
        from modelzoo_trainer.cli.checkpoints import main as run_checkpoint_command

        return run_checkpoint_command(words[1:])
    apart = _APART.get(words[0]) if words else None
    if apart is not None:
        return apart(words[1:])
    options = parse(words)
    try:
        require_sibling("backends")
    except ImportError as error:
        return refuse(str(error))
    try:
        with (
            modules_of_the_user(options),
            StopRequests(owns_process=argv is None) as requests,
        ):
            return _act(options, names, argv, requests)
    except ConfigError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse_path(error)
    except KeyboardInterrupt:  # also while it leaves the block
        return INTERRUPTED


def _report_runs(words: Sequence[str]) -> int:
    """Write a report; its module is imported only now, as it brings a plotting library."""
    command = import_module("modelzoo_trainer.tools.report.command")
    parser = command_parser("report")
    command.add_arguments(parser)
    options = parser.parse_args(words)
    return answered(lambda: command.run(options))


def _launch(words: Sequence[str]) -> int:
    from modelzoo_trainer.cli.launching import main as launch

    return launch(words)


def _convert_config(words: Sequence[str]) -> int:
    from modelzoo_trainer.tools.foreign_configs.command import parser, run

    options = parser(f"{PROG} config").parse_args(words)

    def convert() -> int:
        code, text = run(options)
        return (inspecting.output(text) if text is not None else 0) or code

    return answered(convert)


def _preprocess(words: Sequence[str]) -> int:
    """Convert data to rows; nothing of it imports torch."""
    from modelzoo_trainer.cli.preprocessing import add_arguments, run

    parser = command_parser("data_preprocess")
    add_arguments(parser)
    options = parser.parse_args(words[1:] if words[:1] == ["run"] else words)
    options.params = options.params or options.config
    if options.params is None:
        parser.error("no file is given; name the YAML file")
    try:
        with modules_of_the_user(options):
            return run(options.params, say)
    except ConfigError as error:
        return refuse(str(error))
    except (OSError, RuntimeError) as error:
        return fail(error)
    except KeyboardInterrupt:
        say("Interrupted; run the same command again to continue.")
        return INTERRUPTED


_APART: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "config": _convert_config,
    "data_preprocess": _preprocess,
    "launch": _launch,
    "report": _report_runs,
}
"""Commands with parsers and errors of their own."""


def _act(
    options: argparse.Namespace,
    names: MakeNames | None,
    argv: Sequence[str] | None,
    requests: StopRequests,
) -> int:
    """Do what the options ask for."""
    words = sys.argv if argv is None else [PROG, *argv]
    make_names = names or shipped_names
    if options.supervised is not None:
        return _run_as_child(options, make_names, words, requests)
    if options.action == "plan":
        requests.set_phase(ProcessPhase.RUNNING)  # its folder of temporary files is removed
    if options.action in _INSPECT:
        return _INSPECT[options.action](options, make_names)
    if options.action == "compile":
        return _compile(options, make_names, words, requests)
    runner = Runner(words, requests)
    runner.notes = [
        f"{option}: no effect; it is for Cerebras clusters." for option in options.ignored
    ]
    end_with_launcher()
    if is_distributed():
        return _run_distributed(options, make_names, runner)
    restarts = _restarts(options)
    command = _command(argv, names) if restarts else None
    if command is not None:
        return _supervise(command, restarts, runner.command)
    return runner.run(load_plans(options, make_names))


def _run_distributed(options: argparse.Namespace, names: MakeNames, runner: Runner) -> int:
    """Run the file in this rank as in the others."""

    def task(processes: World, report: Report) -> int:
        runner.report, runner.processes = report, processes
        if processes.rank == 0 and _restarts(options):
            say(
                "note: init.autorestart.max_num_restarts has no effect on several processes: their "
                "launcher restarts them. Use torchrun --max-restarts."
            )
        return runner.run(load_plans(options, names))

    return run_distributed(task, runner.requests)


def _compile(
    options: argparse.Namespace, names: MakeNames, words: Sequence[str], requests: StopRequests
) -> int:
    """Run a few steps in a temporary folder."""
    with TemporaryDirectory() as folder:
        options.num_steps, options.eval_steps = "3", "2"
        options.max_steps = options.num_epochs = None
        options.changes += [f"init.{key}" for key in _UNUSED]
        runner = Runner(words, requests, scratch=Path(folder))
        return runner.run(load_plans(options, names))


# ---- automatic restarts


def _restarts(options: argparse.Namespace) -> list[SupervisorSettings]:
    """Return the restart settings of each trainer; none if the file does not ask for restarts."""
    from modelzoo_trainer.tools.supervisor.settings import read_settings

    return read_settings(
        options.params,
        mode=options.mode,
        changes=options.changes,
        options=overrides(options),
    )


def _command(argv: Sequence[str] | None, names: MakeNames | None) -> list[str] | None:
    """Return the command line that starts this program again; None if there is none."""
    words = sys.argv[1:] if argv is None else list(argv)
    whole = sys.orig_argv
    if argv is None and whole[len(whole) - len(words) :] == words:
        return [sys.executable, *whole[1:]]
    return [sys.executable, "-m", "modelzoo_trainer", *words] if names is None else None


def _supervise(command: list[str], restarts: list[SupervisorSettings], words: Sequence[str]) -> int:
    from modelzoo_trainer.base.secrets import hide_in_command
    from modelzoo_trainer.tools.supervisor.supervising import supervise

    try:
        return supervise(command, restarts, _log_restart, shown=hide_in_command(words))
    except OSError as error:
        return fail(error)


def _log_restart(text: str) -> None:
    say(f"autorestart: {text}")


def _run_as_child(
    options: argparse.Namespace, names: MakeNames, words: Sequence[str], requests: StopRequests
) -> int:
    from modelzoo_trainer.tools.supervisor.child import Child
    from modelzoo_trainer.tools.supervisor.protocol import LaunchSpec, without_launch_spec

    try:
        child = Child(LaunchSpec.parse(options.supervised))
    except (OSError, ValueError) as error:
        return refuse(str(error))
    try:
        runner = Runner(without_launch_spec(list(words)), requests, child)
        return runner.run(load_plans(options, names))
    except Exception as error:
        child.fail(error)
        raise
