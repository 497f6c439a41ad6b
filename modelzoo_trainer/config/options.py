"""Command-line options that override settings of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Option:
    """An option that overrides a setting."""

    name: str  # without its dashes
    metavar: str | None  # what the help calls its value; None = a flag without a value
    help: str


OPTIONS: Final = (
    Option("device", "NAME", "cpu, gpu, auto, ...; overrides trainer.init.device"),
    Option("model_dir", "DIR", "folder of the run; overrides trainer.init.model_dir"),
    Option("checkpoint_path", "PATH", "checkpoint to start from, to validate or to predict with"),
    Option(
        "load_checkpoint_states",
        "PARTS",
        "parts of that checkpoint to load, such as model or model,optimizer; or all",
    ),
    Option("max_steps", "N", "train up to global step N; overrides the length in the file"),
    Option("num_steps", "N", "train for N more steps; overrides the length in the file"),
    Option("num_epochs", "N", "train for N epochs; overrides the length in the file"),
    Option("eval_steps", "N", "number of batches per validation, test or prediction"),
    Option("logging", "LEVEL", "log level: debug, info, warning or error"),
    Option(
        "progress",
        "KIND",
        "console output: bar, lines or none; the default is a bar on a terminal, otherwise lines",
    ),
    Option(
        "disable_strict_checkpoint_loading",
        None,
        "load the parts of a checkpoint that match the model and ignore the rest",
    ),
)
