"""The command line: `python run.py --params params.yaml`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from modelzoo_trainer.errors import ConfigError, ModelZooError

if TYPE_CHECKING:
    from modelzoo_trainer.config.build import TrainerPlan
    from modelzoo_trainer.config.names import Names

MakeNames: TypeAlias = "Callable[[Sequence[ModuleType]], Names]"

DONE: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
BY_SIGNAL: Final = {"SIGINT": 130, "SIGTERM": 143}  # 128 and the signal's number, as shells say it

_MODES: Final = ("train", "train_and_eval", "eval", "eval_all")
_EPILOG: Final = """\
exit codes: 0 done, 1 the run failed, 2 the command or the file is wrong (nothing was started),
130 Ctrl-C, 143 SIGTERM
"""


def main(argv: Sequence[str] | None = None, *, names: MakeNames | None = None) -> int:
    """Run a configuration file and return the exit code.

    Args:
        argv: The arguments; None = those of the process.
        names: Makes what the file may name, given the modules of `--import`; None = what is
            shipped.
    """
    options = _parser().parse_args(argv)
    restore = _exit_on_sigterm()
    try:
        return _run(options, names or _shipped_names)
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
    parser.add_argument("-p", "--params", required=True, type=Path, help="the YAML file")
    parser.add_argument(
        "-m",
        "--mode",
        choices=_MODES,
        default="train_and_eval",
        help="what to run (default: %(default)s)",
    )
    parser.add_argument(
        "--device", help="cpu, gpu, auto, ...; replaces the file's trainer.init.device"
    )
    parser.add_argument(
        "-o", "--model_dir", help="folder of the run; replaces the file's trainer.init.model_dir"
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
        "init.callbacks[EarlyStopping].patience=3; may be repeated",
    )
    return parser


def _run(options: argparse.Namespace, names: MakeNames) -> int:
    try:
        require_sibling("backends")
    except ImportError as error:
        return _refuse(str(error))
    try:
        plans = _plans(options, names)
    except ConfigError as error:
        return _refuse(str(error))
    for plan in plans:
        code = _run_plan(plan)
        if code != DONE:
            return code
    return DONE


def _shipped_names(modules: Sequence[ModuleType]) -> Names:
    from modelzoo_trainer.config.shipped import shipped_names  # imports torch

    return shipped_names(modules)


def _plans(options: argparse.Namespace, names: MakeNames) -> list[TrainerPlan]:
    from modelzoo_trainer.config.load import load_plans
    from modelzoo_trainer.config.names import import_module

    try:
        modules = [import_module(name) for name in options.modules]
    except ConfigError as error:
        raise ConfigError(f"--import: {error}") from None
    return load_plans(
        options.params,
        lambda: names(modules),
        mode=options.mode,
        changes=options.changes,
        device=options.device,
        model_dir=options.model_dir,
    )


def _run_plan(plan: TrainerPlan) -> int:
    """Build and run one trainer; what users wrote raises through, with its traceback."""
    from modelzoo_trainer.core.backend import BackendError, BackendUnavailable

    try:
        trainer = plan.build()
        _save_params(plan, trainer)
    except (ConfigError, BackendUnavailable) as error:
        return _refuse(str(error))
    except (ModelZooError, BackendError) as error:
        return _fail(error)
    try:
        plan.run(trainer)
    except (ModelZooError, BackendError) as error:
        return _fail(error)
    finally:
        trainer.close()
    interrupted: str | None = trainer.interrupted
    return DONE if interrupted is None else BY_SIGNAL.get(interrupted, FAILED)


def _save_params(plan: TrainerPlan, trainer: Any) -> None:
    """Write the file as it was run, changes included, beside the run's log."""
    from modelzoo_trainer.config.resolved import to_yaml

    if not trainer.backend.is_main:
        return
    path = trainer.artifact_dir / "params.yaml"
    try:
        path.write_text(to_yaml(plan.resolved), encoding="utf-8")
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
