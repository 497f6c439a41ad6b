"""Reading a checkpoint: verified first, then loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as load_bytes

from modelzoo_trainer.checkpointing.manifest import STATE, read_manifest, verify
from modelzoo_trainer.checkpointing.skeleton import Tensors, decode
from modelzoo_trainer.errors import CheckpointError


def load(path: Path) -> dict[str, Any]:
    """Verify all files of a checkpoint and return its state.

    Tensors are in host memory of their own: nothing of the files is mapped.

    Raises:
        CheckpointError: If it is not intact, of another version, or not a checkpoint.
    """
    problems = verify(path)
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be used: {'; '.join(problems)}. Choose another one."
        )
    tensors: Tensors = {}
    try:
        for name in read_manifest(path).files:
            if name.endswith(".safetensors"):
                loaded = load_bytes((path / name).read_bytes())
                tensors[name.removesuffix(".safetensors")] = loaded
        skeleton = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"checkpoint {str(path)!r} cannot be read: {error}.") from None
    if not isinstance(skeleton, dict):
        raise CheckpointError(f"{str(path / STATE)!r} holds no state.")
    return decode(skeleton, tensors)
