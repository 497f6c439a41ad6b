"""Reading a checkpoint: verified first, then loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.checkpointing.manifest import STATE, read_manifest, verify
from modelzoo_trainer.checkpointing.skeleton import Tensors, decode
from modelzoo_trainer.checkpointing.tensor_file import read_tensors
from modelzoo_trainer.errors import CheckpointError

_SUFFIX: Final = ".safetensors"


def load(path: Path) -> dict[str, Any]:
    """Verify all files of a checkpoint and return its state.

    Tensors are in host memory of their own: nothing of the files is mapped.

    Args:
        path: Its directory.

    Raises:
        CheckpointError: If it is not intact, of another version, or not a checkpoint.
    """
    problems = verify(path)
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be used: {'; '.join(problems)}. Choose another one."
        )
    names = [name for name in read_manifest(path).files if name.endswith(_SUFFIX)]
    try:
        tensors: Tensors = {name.removesuffix(_SUFFIX): read_tensors(path / name) for name in names}
        skeleton = json.loads((path / STATE).read_text(encoding="ascii"))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {str(path)!r} cannot be read: {error!r}.") from None
    if not isinstance(skeleton, dict):
        raise CheckpointError(f"{str(path / STATE)!r} holds no state.")
    return decode(skeleton, tensors)
