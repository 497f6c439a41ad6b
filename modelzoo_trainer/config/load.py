"""A YAML file, with what the command line changes, to checked plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from modelzoo_trainer.config.build import TrainerPlan, check_config
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.overrides import Override, apply_overrides, parse_override, set_option
from modelzoo_trainer.errors import ConfigError


def load_plans(
    path: Path,
    names: Callable[[], Names],
    *,
    mode: str = "train_and_eval",
    changes: Iterable[str] = (),
    device: str | None = None,
    model_dir: str | None = None,
) -> list[TrainerPlan]:
    """Return the trainers of a file, all of it checked, nothing built.

    Args:
        path: The file.
        names: Makes what the file may name; called when its syntax is known to be right, because
            that imports torch.
        mode: "train", "train_and_eval", "eval" or "eval_all".
        changes: As for `--set`, `PATH=VALUE`; applied in order.
        device: Replaces the file's, whichever of its two keys has it.
        model_dir: Replaces the file's.

    Raises:
        ConfigError: If anything is wrong; one line for each problem.
    """
    overrides = _overrides(changes)
    if device is not None:
        key = ("trainer", "init", "backend", "backend_type")
        overrides.append(set_option(("trainer", "init", "device"), device, "--device"))
        overrides.append(set_option(key, None, "--device", only_present=True))
    if model_dir is not None:
        overrides.append(set_option(("trainer", "init", "model_dir"), model_dir, "--model_dir"))
    return check_config(apply_overrides(read_file(path), overrides), names(), mode)


def _overrides(changes: Iterable[str]) -> list[Override]:
    """Return the parsed changes; what is wrong with any of them is raised together."""
    parsed, wrong = [], []
    for change in changes:
        try:
            parsed.append(parse_override(change))
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return parsed
