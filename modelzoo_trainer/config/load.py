"""A YAML file, with what the command line changes, to checked plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.changes import changes_of
from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.overrides import Override, apply_overrides, parse_override
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.positions import Node, to_plain
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.config.resolved import to_yaml
from modelzoo_trainer.config.secrets import without_secrets
from modelzoo_trainer.errors import ConfigError


def load_plans(
    path: Path,
    names: Callable[[], Names],
    *,
    mode: str | None = "train_and_eval",
    changes: Iterable[str] = (),
    options: Mapping[str, str | None] | None = None,
    for_a_run: bool = True,
) -> list[TrainerPlan]:
    """Return the trainers of a file, all of it checked, nothing built.

    Args:
        path: The file; one of the older layout is converted, with a note that shows the new one.
        names: Makes what the file may name; called when its syntax is known to be right, because
            that imports torch.
        mode: "train", "train_and_eval", "eval" or "eval_all"; None = the first that the file has
            a section for.
        changes: As for `--set`, `PATH=VALUE`; applied in order, after `options`.
        options: The command line's own options by name, see `options.OPTIONS`.
        for_a_run: Whether to refuse what is right in the format but cannot run here.

    Raises:
        ConfigError: If anything is wrong; one line for each problem.
    """
    overrides = _overrides(changes)
    problems = Problems(for_a_run=for_a_run)
    root = read_file(path)
    if is_legacy(root):
        root = _convert(root, problems)
    root = apply_overrides(root, [*changes_of(options or {}, mode, root), *overrides])
    return check_config(root, names(), mode, problems)


def _convert(root: Node, problems: Problems) -> Node:
    converted = convert_legacy(root, problems)
    if not problems.num_added:
        text = to_yaml(without_secrets(to_plain(converted))).rstrip()
        what = (
            f"has the older layout. In today's it reads as follows; changes of the command line "
            f"come on top:\n\n{text}\n"
        )
        problems.note(root.at, "", what)
    return converted


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
