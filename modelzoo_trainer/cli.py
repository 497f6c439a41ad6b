"""The command line: `python run.py --params params.yaml`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.errors import ConfigError, ModelZooError

if TYPE_CHECKING:
    from modelzoo_trainer.config.names import Names
    from modelzoo_trainer.config.plan import TrainerPlan

MakeNames: TypeAlias = "Callable[[Sequence[ModuleType]], Names]"

DONE: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
BY_SIGNAL: Final = {"SIGINT": 130, "SIGTERM": 143}  # 128 and the signal's number, as shells say it

_MODE: Final = "train_and_eval"
_MODES: Final = ("train", _MODE, "eval", "eval_all")
_ALIASES: Final = {"device": ("--target_device",), "model_dir": ("-o",)}
_EPILOG: Final = """\
exit codes: 0 done, 1 the run failed, 2 the command or the file is wrong, 130 Ctrl-C, 143 SIGTERM
"""


def main(argv: Sequence[str] | None = None, *, names: MakeNames | None = None) -> int:
    """Run a configuration file and return the exit code.

    Args:
        argv: The arguments; None = those of the process.
        names: Makes what the file may name, given the modules of `--import`; None = what is
            shipped.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    options.check = options.check or options.explain_hooks
    if options.params is None and not options.schema:
        parser.error("the following arguments are required: -p/--params")
    command = sys.argv if argv is None else ["modelzoo-trainer", *argv]
    restore = _exit_on_sigterm()
    try:
        return _run(options, names or _shipped_names, command)
    except KeyboardInterrupt:
        return BY_SIGNAL["SIGINT"]
    finally:
        restore()


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
        "--schema", action="store_true", help="print the JSON Schema of the files, and end"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module whose classes the file names without their path; may be repeated",
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
    changes = parser.add_argument_group("changes of the file")
    for option in OPTIONS:
        names = [f"--{option.name}", *_ALIASES.get(option.name, ())]
        if option.metavar is None:
            changes.add_argument(*names, action="store_const", const="true", help=option.help)
        else:
            changes.add_argument(*names, dest=option.name, metavar=option.metavar, help=option.help)
    return parser


def _run(options: argparse.Namespace, names: MakeNames, command: Sequence[str]) -> int:
    try:
        require_sibling("backends")
    except ImportError as error:
        return _refuse(str(error))
    try:
        if options.schema:
            return _print_schema(options, names)
        plans = _plans(options, names)
    except ConfigError as error:
        return _refuse(str(error))
    if options.check:
        return _print_report(options, plans)
    for plan in plans:
        code = _run_plan(plan, command)
        if code != DONE:
            return code
    return DONE


def _print_schema(options: argparse.Namespace, names: MakeNames) -> int:
    from modelzoo_trainer.config.json_schema import json_schema

    schema = json_schema(names(_modules(options)))
    return _print(json.dumps(schema, indent=1))


def _print_report(options: argparse.Namespace, plans: Sequence[TrainerPlan]) -> int:
    from modelzoo_trainer.config.report import hook_order, report

    texts = [f"{options.params} is right. Nothing was built."]
    for number, plan in enumerate(plans, 1):
        if len(plans) > 1:
            texts.append(f"Trainer {number} of {len(plans)}")
        texts.append(report(plan))
        if options.explain_hooks:
            texts.append(hook_order(plan))
    return _print("\n\n".join(texts))


def _print(text: str) -> int:
    """Write to standard output; a reader who has had enough is no failure."""
    try:
        print(text, flush=True)  # noqa: T201  # it is what was asked for
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:
        return _fail(error)
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


def _plans(options: argparse.Namespace, names: MakeNames) -> list[TrainerPlan]:
    from modelzoo_trainer.config.load import load_plans

    modules = _modules(options)
    return load_plans(
        options.params,
        lambda: names(modules),
        mode=options.mode or (None if options.check else _MODE),
        changes=options.changes,
        options={option.name: getattr(options, option.name) for option in OPTIONS},
        for_a_run=not options.check,
    )


def _run_plan(plan: TrainerPlan, command: Sequence[str]) -> int:
    """Build and run one trainer; what users wrote raises through, with its traceback."""
    from modelzoo_trainer.core.backend import BackendError, BackendUnavailable

    for note in plan.notes:
        sys.stderr.write(f"note: {note}\n")
    try:
        trainer = plan.build()
        _save_params(plan, trainer, command)
    except (ConfigError, BackendUnavailable) as error:
        return _refuse(str(error))
    except (ModelZooError, BackendError) as error:
        return _fail(error)
    try:
        plan.run(trainer)
    except ConfigError as error:  # what only the data or the model could tell
        return _refuse(str(error))
    except (ModelZooError, BackendError) as error:
        return _fail(error)
    finally:
        trainer.close()
    interrupted: str | None = trainer.interrupted
    return DONE if interrupted is None else BY_SIGNAL.get(interrupted, FAILED)


def _save_params(plan: TrainerPlan, trainer: Any, command: Sequence[str]) -> None:
    """Write the file as it is run, changes included, beside the run's log."""
    from modelzoo_trainer.config.provenance import describe_run

    if not trainer.backend.is_main:
        return
    path = trainer.artifact_dir / "params.yaml"
    try:
        path.write_text(describe_run(plan, command), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None


def _refuse(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return WRONG_USE


def _fail(error: BaseException) -> int:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    sys.stderr.write(f"{type(error).__name__}: {error}{notes}\n")
    return FAILED


def _exit_on_sigterm() -> Any:
    """Let SIGTERM unwind the process where no trainer has taken it over; return how to undo it."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(BY_SIGNAL["SIGTERM"])

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: signals are somebody else's
        return lambda: None
    return lambda: signal.signal(signal.SIGTERM, before)


def require_sibling(name: str) -> None:
    """Check, without importing it, that the top-level package `name` lies beside this one.

    Args:
        name: Of a package of this distribution.

    Raises:
        ImportError: If it is missing, or another folder or package shadows it.
    """
    here = Path(__file__).resolve().parents[1]
    spec = find_spec(name)
    origin = spec.origin if spec is not None else None
    found = Path(origin).resolve().parents[1] if origin is not None else None
    if found == here:
        return
    if found is None:
        raise ImportError(
            f"package {name!r} is not beside modelzoo_trainer in {here}. It is part of "
            f"modelzoo-trainer: reinstall that (the PyPI project called {name!r} is unrelated)."
        )
    raise ImportError(
        f"package {name!r} was found in {found}, but modelzoo-trainer's own lies in {here}. "
        f"Something earlier on sys.path shadows it: start from another folder, or with python -P."
    )
