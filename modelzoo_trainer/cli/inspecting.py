"""Commands that print and run nothing: check, plan, schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from modelzoo_trainer.base.exit_codes import DONE, FAILED, WRONG_USE
from modelzoo_trainer.cli.plans import MakeNames, import_modules, load_plans
from modelzoo_trainer.cli.runner import fail

if TYPE_CHECKING:
    from modelzoo_trainer.config.plan import TrainerPlan


def check(options: argparse.Namespace, names: MakeNames) -> int:
    """Check a file and print what would run; return 2 if that cannot run here."""
    from modelzoo_trainer.base.secrets import hide_in_text
    from modelzoo_trainer.config.printout import hook_order, report, runs_here, verdict

    plans = load_plans(options, names, for_a_run=False)
    texts = [f"{options.params} is valid (nothing was built)."]
    for number, plan in enumerate(plans, 1):
        if len(plans) > 1:
            texts.append(f"Trainer {number} of {len(plans)}")
        texts.append(report(plan))
        if options.explain_hooks:
            texts.append(hook_order(plan))
    texts.append(verdict(plans))
    code = output(hide_in_text("\n\n".join(texts)))
    return code if runs_here(plans) else WRONG_USE


def plan(options: argparse.Namespace, names: MakeNames) -> int:
    """Print what training would take; return 1 if it does not fit in the memory."""
    from modelzoo_trainer.base.secrets import hide_in_text
    from modelzoo_trainer.tools.planning.command import plan_on_paper

    load = partial(_changed_plans, options, names)
    fits, text = plan_on_paper(
        load, options.world_size, options.memory, devices=options.devices, use_data=options.use_data
    )
    code = output(hide_in_text(text))
    return code if fits else FAILED


def _changed_plans(
    options: argparse.Namespace, names: MakeNames, changes: list[str]
) -> list[TrainerPlan]:
    """Return the plans of a file with further changes, in any process."""
    changed = argparse.Namespace(**vars(options) | {"changes": [*options.changes, *changes]})
    return load_plans(changed, names, for_a_run=False)


def schema(options: argparse.Namespace, names: MakeNames) -> int:
    """Print the JSON Schema of the files."""
    from modelzoo_trainer.config.json_schema import json_schema

    return output(json.dumps(json_schema(names(import_modules(options))), indent=1))


def output(text: str) -> int:
    """Write to standard output; a closed pipe is not a failure."""
    try:
        print(text, flush=True)  # noqa: T201  # the output of the command
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:
        return fail(error)
    return DONE
