"""Print how the code hangs together, from the source: python docs/structure.py.

Hooks that `trainer.py` fires, its direct calls to core callbacks, who writes which attribute of the
trainer, and the rooms of the package with their files and lines, from the top floor down: each
imports only from floors below it. `tests/policy/test_structure.py` holds what must not grow.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TRAINER: Final = ROOT / "modelzoo_trainer" / "trainer.py"
PACKAGES: Final = ("backends", "modelzoo_trainer")

CORE: Final = {
    "autorestart": "AutoRestart",
    "checkpoint": "Checkpoint",
    "data": "DataLoaderCallback",
    "early_exit": "EarlyExit",
    "grad_accum": "GradientAccumulation",
    "interruptions": "Interrupt",
    "logging": "Logging",
    "loop": "LoopCallback",
    "loss_accum": "LossAccumulation",
    "precision": "Precision",
    "reproducibility": "Reproducibility",
    "schedule": "RunSchedule",
}
"""Attributes of the trainer that are core callbacks."""

CALLS: Final = {
    "data.next_batch": "act: load a batch",
    "data.end_epoch": "act: go on to the next epoch, after everybody's on_train_epoch_end",
    "data.skip_batches": "act: skip the batches of a bad step",
    "grad_accum.scale": "answer: what of the loss is differentiated",
    "precision.backward": "act: differentiate",
    "precision.optimizer_step": "act: update the parameters",
    "schedule.stages": "answer: which stages the fit has",
    "schedule.stage_continues": "answer: is there another batch in this stage",
    "schedule.count_validation": "act: one dataloader of the validation is done",
    "early_exit.check": "answer: has a stop been asked for",
    "logging.begin_batch": "answer: which hook table the batch has",
    "logging.logs_batch": "answer: is a validation batch logged, also of a loop with its own hooks",
    "loop.step": "act: run a batch, of which an evaluation computes something else than a loss",
    "checkpoint.choose": "answer: which checkpoint",
    "checkpoint.restoring": "act: read",
    "checkpoint.check_parts": "act: refuse what lacks a part, before any of it is used",
    "checkpoint.to_roll_back_to": "answer: which checkpoint",
    "checkpoint.write": "act: write",
    "checkpoint.report_committed": "act: what is on disk by now is told by a hook",
}
"""Direct calls of `trainer.py` to core callbacks that the sequence needs, with the reason."""

SETTINGS: Final = {
    "data.split_batches": "split_train_batches",
    "grad_accum.activate": "split_train_batches",
    "loss_accum.activate": "split_train_batches",
    "early_exit.request_stop": "what an interceptor asks for by StopTraining",
    "logging.read": "read",
    "logging.drain": "drain",
    "logging.log": "log_metrics_dict",
    "logging.name_scope": "name_scope",
}
"""Calls of methods of the trainer that are for callbacks to call, and no part of the sequence."""

WRITERS: Final = {
    "backend": "core/backend.py",
    "model": "core/model.py",
    "compiled_model": "core/model.py",
    "model_call": "core/parts/model_call.py",
    "optimizer": "core/optimizer.py",
    "manual_steps": "core/optimizer.py",
    "schedulers": "core/schedulers.py",
    "artifact_dir": "core/artifact_dir.py",
    "summary_dir": "core/artifact_dir.py",
    "global_step": "core/loop.py",
    "interrupted": "core/early_exit.py",
    "is_from_file": "config/plan.py",
    "late_signal": "core/interrupt.py",
    "is_log_step": "core/logging.py",  # of training; trainer.py sets that of validations
    "rehearses": "core/logging.py",
    "hooks": "tools/lr_finder.py",  # calls nobody in its own steps; trainer.py sets all others
    "metadata": "zoo/callbacks/model_zoo_params_metadata.py",
    "val_micro_batch_size": "zoo/callbacks/flags.py",
    "raise_on_interrupt": "cli/runner.py",
}
"""Attributes of the trainer that others set, each in one file."""


ENGINE: Final = (
    *("callbacks", "loggers", "trainer", "core", "loading", "callback", "hooks"),
    *("checkpointing", "optim", "base", "errors"),
)
"""The rooms that know no model, dataset, configuration file or command line."""


def hooks_fired() -> list[str]:
    """Return the names of the hooks that `trainer.py` fires, once for each place."""
    return [
        node.func.attr
        for node in ast.walk(_tree(TRAINER))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.hooks"
    ]


def direct_calls() -> list[str]:
    """Return the direct calls of `trainer.py` to core callbacks, once for each place."""
    found = []
    for node in ast.walk(_tree(TRAINER)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).removeprefix("self.")
            if owner in CORE:
                found.append(f"{owner}.{node.func.attr}")
            elif owner == "data":  # a local name, for speed
                found.append(f"data.{node.func.attr}")
    return found


def written() -> Iterator[tuple[str, str]]:
    """Yield attributes of the trainer, such as "global_step", and the file that sets each.

    Also "data.epoch": what one sets of a core callback that is another one's.
    """
    for path in sorted((ROOT / "modelzoo_trainer").rglob("*.py")):
        name = path.relative_to(ROOT / "modelzoo_trainer").as_posix()
        for node in ast.walk(_tree(path)):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            for target in _flat(targets):
                if not isinstance(target, ast.Attribute):
                    continue
                text = ast.unparse(target)
                if text.startswith("trainer."):
                    yield text.removeprefix("trainer."), name


def _flat(targets: list[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple):
            yield from _flat(target.elts)
        else:
            yield target


def floors() -> list[list[str]]:
    """Return the rooms of `modelzoo_trainer` by floor, highest first; lint-imports checks them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[name.strip() for name in re.split(r"[:|]", layer)] for layer in layers]


def sizes() -> dict[str, list[int]]:
    """Return the lines of each file, by package and room, highest first."""
    package = ROOT / "modelzoo_trainer"
    places = {name: package / name for floor in floors() for name in floor}
    places |= {"__init__": package / "__init__", "backends": ROOT / "backends"}
    return {
        name: [
            len(path.read_text(encoding="utf-8").splitlines())
            for path in (*place.rglob("*.py"), place.with_suffix(".py"))
            if path.is_file()
        ]
        for name, place in places.items()
    }


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def main() -> None:
    """Print all tables."""
    hooks, calls = hooks_fired(), direct_calls()
    print(f"hooks fired by trainer.py: {len(set(hooks))}, in {len(hooks)} places")
    print("  " + " ".join(dict.fromkeys(hooks)))
    needed = [call for call in calls if call in CALLS]
    print(f"\ndirect calls of the sequence to core callbacks: {len(needed)}")
    for call, why in CALLS.items():
        print(f"  {call:28s} {calls.count(call)} x  {why}")
    print("\nattributes of the trainer that others set")
    for attribute, name in WRITERS.items():
        print(f"  {attribute:24s} {name}")
    print("\nrooms: each imports only from floors below it")
    found = sizes()
    for number, floor in enumerate([*floors(), ["backends"]]):
        for name in floor:
            lines = found[name]
            print(f"  {number:2d} {name:16s} {len(lines):3d} files  {sum(lines):6d} lines")
    engine = sum(sum(lines) for name, lines in found.items() if name in ENGINE)
    total = sum(map(sum, found.values()))
    print(f"  engine, from callbacks down to base: {engine} lines; all: {total} lines")


if __name__ == "__main__":
    main()
