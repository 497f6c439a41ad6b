"""The quick look at a checkpoint: its manifest, and the names and sizes of its files."""

from __future__ import annotations

from pathlib import Path

from modelzoo_trainer.checkpointing.manifest import MANIFEST, Manifest
from modelzoo_trainer.errors import CheckpointError


def listing_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with a checkpoint that can be seen without reading its files.

    Args:
        path: Its directory.
        manifest: What was read of it.
    """
    try:
        found = {entry.name: entry for entry in path.iterdir() if entry.name != MANIFEST}
    except OSError as error:
        return [f"{str(path)!r} cannot be read: {error.strerror or error}"]
    known = manifest.files
    problems = [f"{name!r} is missing" for name in sorted(known.keys() - found.keys())]
    problems += [f"{name!r} does not belong to it" for name in sorted(found.keys() - known.keys())]
    for name in sorted(known.keys() & found.keys()):
        problem = _problem(found[name], known[name].size_bytes)
        if problem is not None:
            problems.append(f"{name!r} {problem}")
    return problems


def _problem(file: Path, num_bytes: int) -> str | None:
    try:
        if file.is_symlink() or not file.is_file():
            return "is not a plain file"
        size = file.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if size == num_bytes else f"has {size} bytes instead of {num_bytes}"


def check_listing(path: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError if names or sizes are not those of the manifest."""
    problems = listing_problems(path, manifest)
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be used: {'; '.join(problems)}. Choose another one."
        )
