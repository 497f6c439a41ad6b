"""The origin of a run, as comments of its saved configuration: versions, commit, command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from modelzoo_trainer.base.secrets import hide_in_command, left_out, without_secrets
from modelzoo_trainer.base.versions import git_commit as git_commit
from modelzoo_trainer.base.versions import versions
from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.config.plan import TrainerPlan


def describe_run(plan: TrainerPlan, command: Sequence[str]) -> str:
    """Return the configuration of a run as YAML, with its origin in comments.

    The text is a valid configuration. Secrets are removed and listed in the comments.
    """
    modules = [word for word in command if word.startswith("--import")]
    head = [
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC before the first step; run it again "
        f"with --mode {plan.mode}{' and the --import options below' if modules else ''}",
        f"command: {shlex.join(hide_in_command(command))}",
        f"versions: {versions()}",
        f"git commit: {git_commit()}",
        *(
            f"removed as a secret, must be given again: {path}"
            for path, _ in left_out(plan.resolved)
        ),
        *(f"note: {str(note).splitlines()[0]}" for note in plan.notes),
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
    return comments + to_yaml(without_secrets(plan.resolved))
