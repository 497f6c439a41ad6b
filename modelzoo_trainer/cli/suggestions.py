"""Suggestions for unknown commands and options, and the cluster options of `cszoo`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

CLUSTER_OPTIONS: Final[dict[str, int | str]] = {
    "credentials_path": 1,
    "debug_args": "*",
    "debug_args_path": 1,
    "disable_version_check": 0,
    "ini": "*",
    "job_labels": "*",
    "job_priority": 1,
    "mgmt_address": 1,
    "mgmt_namespace": 1,
    "mount_dirs": "*",
    "num_csx": 1,
}
"""Options of `cszoo` that only its own cluster uses, with their number of values."""

_LR: Final = "--set init.optimizer.ClassName.lr=VALUE, where ClassName is the optimizer in the file"
_OPTIONS: Final = {
    "epochs": "--num_epochs",
    "max_epochs": "--num_epochs",
    "steps": "--max_steps",
    "output_dir": "--model_dir",
    "resume": "the same command without it (the run resumes from the newest checkpoint in "
    "model_dir), or --checkpoint_path PATH",
    "seed": "--set init.seed=N",
    "lr": _LR,
    "learning_rate": _LR,
    "batch_size": "--set fit.train_dataloader.batch_size=N",
}
"""What other programs call it, and what it is called here."""
_WITHOUT_COMMAND: Final = {"config": "--params"}
_WITH_COMMAND: Final = {
    "params": "modelzoo-trainer {command} params.yaml, without an option for the file",
    "config": "modelzoo-trainer {command} params.yaml, without an option for the file",
    "mode": "the command for that mode, such as fit or validate",
    "check": "modelzoo-trainer check params.yaml",
    "explain_hooks": "modelzoo-trainer check params.yaml --explain-hooks",
    "plan": "modelzoo-trainer plan params.yaml",
    "world_size": "torchrun --nproc_per_node N to train with N processes, or modelzoo-trainer plan "
    "params.yaml --world-size N",
    "memory": "modelzoo-trainer plan params.yaml --memory SIZE",
    "schema": "modelzoo-trainer schema",
}
_COMMANDS: Final = {
    "train": "fit",
    "train_and_eval": "fit",
    "run": "fit",
    "eval": "validate",
    "evaluate": "validate",
    "eval_all": "validate_all",
    "ckpt": "checkpoint",
    "checkpoints": "checkpoint",
}


def suggest_option(word: str, known: Iterable[str], command: str | None) -> str:
    """Return ". Use ..." for an unknown option; "" if nothing is near.

    `known`: options that override settings, without dashes. `command`: None = none.
    """
    if not word.startswith("-"):
        return ""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    other = _WITH_COMMAND if command else _WITHOUT_COMMAND
    options = other | {option: f"--{option}" for option in known} | _OPTIONS
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    return f". Use {options[near[0]].format(command=command)}" if near else ""


def suggest_command(word: str, known: Iterable[str]) -> str:
    """Return what to write in place of an unknown command."""
    if word.endswith((".yaml", ".yml")):
        return f"To train with that file: modelzoo-trainer fit {word}"
    commands = {name: name for name in known} | _COMMANDS
    near = difflib.get_close_matches(word.lower().replace("-", "_"), commands, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {commands[near[0]]!r}?"
    return f"Commands: {', '.join(known)}."
