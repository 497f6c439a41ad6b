"""The plans that the options of the command line ask for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.config.names import Names
    from modelzoo_trainer.config.plan import TrainerPlan

MakeNames: TypeAlias = "Callable[[Sequence[ModuleType]], Names]"
"""Returns the names that a file may use, given the modules of `--import`."""


def load_plans(
    options: argparse.Namespace, names: MakeNames, *, for_a_run: bool = True
) -> list[TrainerPlan]:
    """Return the plans of the file, with the overrides of the command line.

    Raises:
        ConfigError: If the file or an option is invalid.
    """
    from modelzoo_trainer.config import build

    modules = import_modules(options)
    plans = build.load_plans(
        options.params,
        lambda: names(modules),
        mode=options.mode,
        changes=options.changes,
        options=overrides(options),
        for_a_run=for_a_run,
    )
    return plans if options.restrict is None else options.restrict(plans)


@contextmanager
def modules_of_the_user(options: argparse.Namespace) -> Iterator[None]:
    """Append the folder of the file, the working directory and others to Python's path."""
    params: Path | None = options.params
    folders = [str(Path(__file__).resolve().parents[2])]  # first: a user's `backends` must not win
    with suppress(OSError):  # the working directory is gone
        folders += [] if params is None else [os.path.dirname(os.path.abspath(params))]
        folders += [os.path.abspath(folder) for folder in options.python_paths]
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


def import_modules(options: argparse.Namespace) -> list[ModuleType]:
    """Import the modules of `--import`.

    Raises:
        ConfigError: If there is no such module.
    """
    from modelzoo_trainer.base.user_modules import import_module

    try:
        return [import_module(name) for name in options.modules]
    except ConfigError as error:
        raise ConfigError(f"--import: {error}") from None


def overrides(options: argparse.Namespace) -> dict[str, str | None]:
    """Return the options that override settings by name; None where not given."""
    return {option.name: getattr(options, option.name) for option in OPTIONS}


def shipped_names(modules: Sequence[ModuleType]) -> Names:
    """Return the names of all shipped classes, and of those in modules."""
    from modelzoo_trainer.config import shipped  # imports torch

    return shipped.shipped_names(modules)


def check_run(options: argparse.Namespace) -> list[TrainerPlan]:
    """Check the file of a run that is started elsewhere, and return its plans.

    Raises:
        ConfigError: If it is invalid, or needs what this package does not have.
    """
    from modelzoo_trainer.config.positions import DATA

    with modules_of_the_user(options):
        plans = load_plans(options, shipped_names, for_a_run=False)
    elsewhere = ("checkpoint", DATA, "device")  # may be where the run will be
    noted = dict.fromkeys(note for plan in plans for note in plan.notes)
    lacks = [str(note) for note in noted if note.lack and note.lack.kind not in elsewhere]
    if lacks:
        raise ConfigError("\n".join(lacks))
    return plans
