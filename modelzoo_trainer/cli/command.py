"""The command line: `python run.py --params params.yaml`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeAlias

from modelzoo_trainer.cli.distributed_run import (
    Report,
    end_with_launcher,
    is_distributed,
    run_distributed,
)
from modelzoo_trainer.cli.runner import Runner, fail, refuse
from modelzoo_trainer.cli.signals import StopRequests
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.exit_codes import DONE, FAILED, INTERRUPTED
from modelzoo_trainer.sibling import require_sibling
from modelzoo_trainer.stderr import open_missing_streams, say

if TYPE_CHECKING:
    from modelzoo_trainer.config.names import Names
    from modelzoo_trainer.config.plan import TrainerPlan
    from modelzoo_trainer.devices import World
    from modelzoo_trainer.supervisor.settings import Settings

MakeNames: TypeAlias = "Callable[[Sequence[ModuleType]], Names]"

_MODE: Final = "train_and_eval"
_MODES: Final = ("train", _MODE, "eval", "eval_all")
_ALIASES: Final = {"device": ("--target_device",), "model_dir": ("-o",)}
_UNUSED: Final = (
    "checkpoint=null",
    "loggers=[]",
    "autorestart=null",
    "progress=none",
)  # by --compile-only
_MEANT: Final = {
    "epochs": "--num_epochs",
    "max_epochs": "--num_epochs",
    "steps": "--max_steps",
    "output_dir": "--model_dir",
    "config": "--params",
    "resume": "the same command: a run resumes by itself, or name a --checkpoint_path",
    "seed": "--set init.seed=N",
    "lr": "--set init.optimizer.ClassName.lr=VALUE, with the optimizer of the file",
    "learning_rate": "--set init.optimizer.ClassName.lr=VALUE, with the optimizer of the file",
    "batch_size": "--set fit.train_dataloader.batch_size=N",
}
"""What other programs call it, and what it is here."""
_SUPERVISED: Final = "--supervised"
_EPILOG: Final = """\
exit codes:
  0    done: everything came to its end
  1    the run failed
  2    the command or the file is wrong
  130  stopped by Ctrl-C (SIGINT)
  143  stopped by SIGTERM, SIGUSR1, a stop file or the end of loop.max_time

A run that was stopped wrote a checkpoint if it could; the same command goes on from it. With
init.autorestart.max_num_restarts in the file, a run that fails is started again by itself.
"""


def main(argv: Sequence[str] | None = None, *, names: MakeNames | None = None) -> int:
    """Run a configuration file and return the exit code.

    `names`: makes what the file may name, given the modules of `--import`; None = what is shipped.
    """
    if argv is None:
        open_missing_streams()
    options = _parse(argv)
    try:
        require_sibling("backends")
    except ImportError as error:
        return refuse(str(error))
    words = sys.argv if argv is None else ["modelzoo-trainer", *argv]
    try:
        with (
            _modules_of_the_user(options.params),
            StopRequests(owns_process=argv is None) as requests,
        ):
            if options.supervised is not None:
                return _run_as_child(options, names or _shipped_names, words, requests)
            if options.plan:
                return _plan(options, names or _shipped_names)
            if options.compile_only:
                return _compile(options, names or _shipped_names, words, requests)
            runner = Runner(words, requests, owns_process=argv is None)
            return _run_or_restart(options, names, runner, argv)
    except ConfigError as error:
        return refuse(str(error))
    except KeyboardInterrupt:  # also while it leaves the block
        return INTERRUPTED


@contextmanager
def _modules_of_the_user(params: Path | None) -> Iterator[None]:
    """Have modules beside the file and in the working folder found inside, after all others."""
    folders = [str(Path(__file__).resolve().parents[2])]  # first: a user's `backends` must not win
    with suppress(OSError):  # the working folder is gone
        folders += [] if params is None else [os.path.dirname(os.path.abspath(params))]
        folders.append(str(Path.cwd()))
    known = {os.path.realpath(entry or os.curdir) for entry in sys.path}
    added = [folder for folder in dict.fromkeys(folders) if os.path.realpath(folder) not in known]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            with suppress(ValueError):  # removed in the meantime
                sys.path.remove(folder)


def _run_or_restart(
    options: argparse.Namespace,
    names: MakeNames | None,
    runner: Runner,
    argv: Sequence[str] | None,
) -> int:
    """Run the file here, together with other processes, or in one that is watched."""
    if not (options.check or options.schema):
        end_with_launcher()
        if is_distributed():
            return _run_distributed(options, names or _shipped_names, runner)
        restarts = _restarts(options)
        command = _command(argv, names) if restarts else None
        if command is not None:
            return _supervise(command, restarts, runner.command)
    return _run(options, names or _shipped_names, runner)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0])}")
    options.check = options.check or options.explain_hooks
    if options.params is None and not options.schema:
        parser.error("the following arguments are required: -p/--params")
    if not options.plan and (options.world_size is not None or options.memory is not None):
        parser.error("--world-size and --memory belong to --plan; torchrun starts the processes")
    return options


def _hint(word: str) -> str:
    """Return what an unknown option may have been meant as."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    known = {option.name: f"--{option.name}" for option in OPTIONS} | _MEANT
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f". Use {known[near[0]]}" if near and word.startswith("-") else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modelzoo-trainer",
        description="Train or validate what a YAML file describes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-p", "--params", type=Path, metavar="FILE", help="the YAML file")
    parser.add_argument("-m", "--mode", choices=_MODES, help=f"what to run (default: {_MODE})")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the file, list what would run, and run nothing; without --mode for the "
        "first mode that the file has a section for",
    )
    parser.add_argument(
        "--explain-hooks",
        action="store_true",
        help="with --check: list who is called at each hook, in order",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="take a few steps of training and validation, say how many graphs they compiled, and "
        "write nothing; with backend.cache_dir in the file the next run finds them",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="say what training takes of each process: memory, what is sent, arithmetic; on paper, "
        "without devices and data, and write nothing",
    )
    parser.add_argument(
        "--world-size", metavar="N", help="with --plan: the number of processes (default: 1)"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="with --plan: memory of each process's device, such as 80GiB; if the run does not fit "
        "say what would, and end with exit code 1",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of the files, and end"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module whose classes the file names without their path; installed, beside the file "
        "or in the working folder; may be repeated",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="change a value of the file, such as init.loop.max_steps=10 or "
        "init.callbacks[KeepNCheckpoints].n=3; may be repeated",
    )
    parser.add_argument(_SUPERVISED, help=argparse.SUPPRESS)  # for a supervisor to give
    changes = parser.add_argument_group("changes of the file")
    for option in OPTIONS:
        names = [f"--{option.name}", *_ALIASES.get(option.name, ())]
        if option.metavar is None:
            changes.add_argument(*names, action="store_const", const="true", help=option.help)
        else:
            changes.add_argument(*names, dest=option.name, metavar=option.metavar, help=option.help)
    return parser


def _run(options: argparse.Namespace, names: MakeNames, runner: Runner) -> int:
    if options.schema:
        return _print_schema(options, names)
    if options.check:
        return _print_report(options, _plans(options, names))
    return runner.run(_plans(options, names))


def _run_distributed(options: argparse.Namespace, names: MakeNames, runner: Runner) -> int:
    """Run the file in this process as in the others."""

    def task(processes: World, report: Report) -> int:
        runner.report, runner.processes = report, processes
        if processes.rank == 0 and _restarts(options):
            say(
                "note: init.autorestart.max_num_restarts: no effect here. torchrun starts all "
                "processes again: --max-restarts."
            )
        return runner.run(_plans(options, names))

    return run_distributed(task, runner.requests, owns_process=runner.owns_process)


def _compile(
    options: argparse.Namespace, names: MakeNames, words: Sequence[str], requests: StopRequests
) -> int:
    """Run a few steps in a folder that is removed afterwards."""
    with TemporaryDirectory() as folder:
        options.num_steps, options.eval_steps = "3", "2"
        options.max_steps = options.num_epochs = None
        options.changes += [f"init.{key}" for key in _UNUSED]
        return _run(options, names, Runner(words, requests, scratch=Path(folder)))


def _plan(options: argparse.Namespace, names: MakeNames) -> int:
    """Print what the run would take, and change nothing."""
    from modelzoo_trainer.config.secrets import hide_in_text
    from modelzoo_trainer.planning.command import plan_on_paper

    given = list(options.changes)

    def load(changes: list[str]) -> list[TrainerPlan]:
        options.changes = [*given, *changes]
        return _plans(options, names, for_a_run=False)

    fits, text = plan_on_paper(load, options.world_size, options.memory)
    code = _print(hide_in_text(text))
    return code if fits else FAILED


def _restarts(options: argparse.Namespace) -> list[Settings]:
    """Return what the file says of restarts; nothing if it asks for none."""
    from modelzoo_trainer.supervisor.settings import read_settings

    return read_settings(
        options.params,
        mode=options.mode or _MODE,
        changes=options.changes,
        options=_given(options),
    )


def _command(argv: Sequence[str] | None, names: MakeNames | None) -> list[str] | None:
    """Return the command line as it can be started again; None if it cannot."""
    words = sys.argv[1:] if argv is None else list(argv)
    whole = sys.orig_argv
    if argv is None and whole[len(whole) - len(words) :] == words:
        return [sys.executable, *whole[1:]]
    return [sys.executable, "-m", "modelzoo_trainer", *words] if names is None else None


def _supervise(command: list[str], restarts: list[Settings], words: Sequence[str]) -> int:
    from modelzoo_trainer.config.secrets import hide_in_command
    from modelzoo_trainer.supervisor.supervising import supervise

    try:
        return supervise(command, restarts, _report, shown=hide_in_command(words))
    except OSError as error:
        return fail(error)


def _report(text: str) -> None:
    say(f"autorestart: {text}")


def _run_as_child(
    options: argparse.Namespace, names: MakeNames, words: Sequence[str], requests: StopRequests
) -> int:
    from modelzoo_trainer.supervisor.child import Child
    from modelzoo_trainer.supervisor.protocol import LaunchSpec, without_launch_spec

    try:
        child = Child(LaunchSpec.parse(options.supervised))
    except (OSError, ValueError) as error:
        return refuse(str(error))
    try:
        return _run(options, names, Runner(without_launch_spec(list(words)), requests, child))
    except Exception as error:
        child.fail(error)
        raise


def _print_schema(options: argparse.Namespace, names: MakeNames) -> int:
    from modelzoo_trainer.config.json_schema import json_schema

    schema = json_schema(names(_modules(options)))
    return _print(json.dumps(schema, indent=1))


def _print_report(options: argparse.Namespace, plans: Sequence[TrainerPlan]) -> int:
    from modelzoo_trainer.config.report import hook_order, report
    from modelzoo_trainer.config.secrets import hide_in_text

    texts = [f"{options.params} is right. Nothing was built."]
    for number, plan in enumerate(plans, 1):
        if len(plans) > 1:
            texts.append(f"Trainer {number} of {len(plans)}")
        texts.append(report(plan))
        if options.explain_hooks:
            texts.append(hook_order(plan))
    return _print(hide_in_text("\n\n".join(texts)))


def _print(text: str) -> int:
    """Write to standard output; a reader who has had enough is no failure."""
    try:
        print(text, flush=True)  # noqa: T201  # it is what was asked for
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:
        return fail(error)
    return DONE


def _shipped_names(modules: Sequence[ModuleType]) -> Names:
    from modelzoo_trainer.config.shipped import shipped_names  # imports torch

    return shipped_names(modules)


def _modules(options: argparse.Namespace) -> list[ModuleType]:
    from modelzoo_trainer.config.names import import_module

    try:
        return [import_module(name) for name in options.modules]
    except ConfigError as error:
        raise ConfigError(f"--import: {error}") from None


def _plans(
    options: argparse.Namespace, names: MakeNames, *, for_a_run: bool = True
) -> list[TrainerPlan]:
    from modelzoo_trainer.config.build import load_plans

    modules = _modules(options)
    return load_plans(
        options.params,
        lambda: names(modules),
        mode=options.mode or (None if options.check else _MODE),
        changes=options.changes,
        options=_given(options),
        for_a_run=for_a_run and not options.check,
    )


def _given(options: argparse.Namespace) -> dict[str, str | None]:
    return {option.name: getattr(options, option.name) for option in OPTIONS}
