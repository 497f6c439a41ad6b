"""Versions of the packages in use, and the git commit of the working folder."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from typing import Final

_PACKAGES: Final = ("modelzoo-trainer", "torch", "numpy")
_PATIENCE: Final = 5  # seconds for git, which may be slow on a network file system
_TRANSPORTS: Final = ("ext", "file", "git", "http", "https", "ssh")
_GIT: Final = (
    *("git", "--no-pager", "--no-optional-locks"),
    *("-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}", "-c", "protocol.allow=never"),
    # A partial clone may run a configured program to fetch objects.
    *(word for one in _TRANSPORTS for word in ("-c", f"protocol.{one}.allow=never")),
)


@cache  # read from files, which takes milliseconds
def versions() -> str:
    """Return the versions of Python and the main packages, in one line."""
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # run from a checkout
            found.append(f"{name} not installed")
    return ", ".join(found)


def git_commit() -> str:
    """Return the commit of the working folder, and whether it has changes; "none" if none.

    Does not run programs from the repository's git configuration.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        filters = _filters()
        if any("=" in name for name in filters):  # invalid for git -c
            return f"{commit} (files not compared: git filter {filters[0]!r})"
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
