"""The options of the command line that stand for changes of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Option:
    """An option that changes the file."""

    name: str  # without its dashes
    metavar: str | None  # what the help calls its value; None = it has none, it is a switch
    help: str


OPTIONS: Final = (
    Option("device", "NAME", "cpu, gpu, auto, ...; replaces the file's trainer.init.device"),
    Option("model_dir", "DIR", "folder of the run; replaces the file's trainer.init.model_dir"),
    Option("checkpoint_path", "PATH", "checkpoint to start from, or to validate"),
    Option(
        "load_checkpoint_states",
        "PARTS",
        "parts of that checkpoint to load, such as model or model,optimizer; or all",
    ),
    Option("max_steps", "N", "train until this step; replaces every length of the file"),
    Option("num_steps", "N", "train this many steps more; replaces every length of the file"),
    Option("num_epochs", "N", "train this many passes; replaces every length of the file"),
    Option("eval_steps", "N", "batches of a validation"),
    Option("logging", "LEVEL", "debug, info, warning or error"),
    Option(
        "progress",
        "KIND",
        "what the console shows: bar, lines or none; a bar on a terminal, else lines",
    ),
    Option("disable_strict_checkpoint_loading", None, "load what fits and leave the rest"),
)
