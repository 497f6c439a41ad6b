"""Saving a state: taken apart, written, committed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeAlias

from modelzoo_trainer.checkpointing.manifest import STATE
from modelzoo_trainer.checkpointing.state_json import Encoder
from modelzoo_trainer.checkpointing.tensor_file import bytes_of
from modelzoo_trainer.checkpointing.transaction import Draft, check_step, plain_facts

SUFFIX: Final = ".safetensors"
Files: TypeAlias = Mapping[str, Iterable[bytes | memoryview]]
"""What is to be written: by name, piece by piece."""


def save(
    path: Path,
    state: Mapping[str, Any],
    *,
    step: SupportsIndex,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint so that it is there whole, also after a power loss, or not at all.

    Every file, the directory and its parent are synchronised around one rename.

    Args:
        path: A name that is not in use.
        state: What to save; see `Encoder`.
        step: The global step, >= 0, for the manifest.
        facts: What else the manifest is to say: text, numbers, lists and mappings of them.

    Raises:
        CheckpointError: If the name is in use, the state has something that cannot be saved, or
            the disk refuses. Nothing is left behind then.

    Cost: One block of one tensor at a time is in memory besides the state.
    """
    plain_step, plain = check_step(step), plain_facts(facts or {})
    encoded = Encoder(state)
    files: dict[str, Iterable[bytes | memoryview]] = {
        f"{stem}{SUFFIX}": bytes_of(tensors) for stem, tensors in encoded.tensors.items()
    }
    write_files(Draft(path), files | {STATE: [skeleton_text(encoded)]}, plain_step, plain)


def skeleton_text(encoded: Encoder) -> bytes:
    """Return a state without its tensors as it is written."""
    return json.dumps(encoded.skeleton, allow_nan=False).encode("ascii")


def write_files(draft: Draft, files: Files, step: int, facts: Mapping[str, Any]) -> None:
    """Write all files of a checkpoint and commit it.

    Raises:
        CheckpointError: If the disk refuses. Nothing is left behind then.
    """
    with draft:
        for name, chunks in files.items():
            draft.write(name, chunks)
        draft.commit(step=step, facts=facts)
