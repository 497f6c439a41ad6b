"""The origin of a run, as comments of its saved configuration: versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Final

from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.secrets import hide_in_command, left_out, without_secrets

_PACKAGES: Final = ("modelzoo-trainer", "torch", "numpy")
_PATIENCE: Final = 5  # seconds for git, whose folder may lie on a network
_TRANSPORTS: Final = ("ext", "file", "git", "http", "https", "ssh")
_GIT: Final = (
    *("git", "--no-pager", "--no-optional-locks"),
    *("-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}", "-c", "protocol.allow=never"),
    # A partial clone fetches what it lacks by a program that its configuration names.
    *(word for one in _TRANSPORTS for word in ("-c", f"protocol.{one}.allow=never")),
)


def describe_run(plan: TrainerPlan, command: Sequence[str]) -> str:
    """Return the configuration of a run as YAML, with its origin in comments.

    The text is a valid configuration. Secrets are removed and listed in the comments.
    """
    modules = [word for word in command if word.startswith("--import")]
    head = [
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC before the first step; run it again "
        f"with --mode {plan.mode}{' and the --import options below' if modules else ''}",
        f"command: {shlex.join(hide_in_command(command))}",
        f"versions: {_versions()}",
        f"git commit: {git_commit()}",
        *(
            f"removed as a secret, must be given again: {path}"
            for path, _ in left_out(plan.resolved)
        ),
        *(f"note: {str(note).splitlines()[0]}" for note in plan.notes),
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
    return comments + to_yaml(without_secrets(plan.resolved))


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # not installed
            found.append(f"{name} not installed")
    return ", ".join(found)


def git_commit() -> str:
    """Return the git commit of the working directory, and whether it has uncommitted changes.

    "none" without one. No program that the git configuration of the folder names is run.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        filters = _filters()
        if any("=" in name for name in filters):  # git -c takes no such name
            return f"{commit} (not compared with the files: git filter {filters[0]!r})"
        off = [f"{name}.{key}" for name in filters for key in ("clean=", "process=", "required=")]
        words = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
        changes = _git(*(word for one in off for word in ("-c", one)), *words)
    except (OSError, subprocess.SubprocessError):
        return "none"
    if not changes:
        return commit
    how = " (files compared without git filters)" if filters else ""
    return f"{commit} with uncommitted changes{how}"


def _filters() -> list[str]:
    """Return the configured filter drivers; `git status` would run them on changed files."""
    names = _git("config", "--null", "--name-only", "--list").split("\0")
    found = {name.rpartition(".")[0] for name in names if name.startswith("filter.")}
    return sorted(found, key=lambda name: "=" not in name)


def _git(*words: str) -> str:
    done = subprocess.run(
        (*_GIT, *words),
        capture_output=True,
        check=True,
        timeout=_PATIENCE,
        text=True,
        errors="surrogateescape",
    )
    return done.stdout.strip()
