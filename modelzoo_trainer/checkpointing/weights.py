"""Read and write files of weights: safetensors, single or in shards, and files of torch.save."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.lazy_weights import (
    INDEX,
    PICKLES,
    SINGLE,
    is_checkpoint,
    open_weights,
)
from modelzoo_trainer.checkpointing.load_save import load
from modelzoo_trainer.checkpointing.manifest import SUFFIX
from modelzoo_trainer.checkpointing.state_json import StateEncoder, decode
from modelzoo_trainer.checkpointing.tensor_file import bytes_of
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, LENGTH_BYTES, METADATA
from modelzoo_trainer.checkpointing.torch_file import SUFFIXES
from modelzoo_trainer.errors import CheckpointError, folder_reason


def holds_weights(path: Path) -> bool:
    """Return whether a path is meant for `read_weights`, and is not a checkpoint.

    A folder is if it has weights, even if only in files that `read_weights` refuses. An uncommitted
    checkpoint is not.
    """
    if not path.is_dir():
        return path.exists()
    if is_checkpoint(path):
        return False
    return any(
        entry.name in (SINGLE, INDEX) or entry.suffix.lower() in (*SUFFIXES, *PICKLES)
        for entry in path.iterdir()
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, or of a folder in the layout of Hugging Face.

    Nothing of a safetensors file is unpickled, and no file stays mapped. Includes names that the
    file's metadata lists as aliases of a tensor (tied weights, as written by
    `safetensors.torch.save_model`). A `.pt`, `.pth`, `.bin` or `.ckpt` file is read by
    `torch_file.open_torch_file`, with `weights_only=True`. To read one tensor at a time, see
    `lazy_weights.open_weights`.

    Args:
        path: As for `lazy_weights.open_weights`.

    Raises:
        CheckpointError: As `lazy_weights.open_weights`.

    Cost: Reads each safetensors file once; there is no digest, so bit errors are not detected.
    """
    return open_weights(path).read_all()


MODEL: Final = "model"  # the key of the state


class TargetError(CheckpointError):
    """The file to be written has an invalid name."""


def export(path: str | Path, file: str | Path, *, force: bool = False) -> list[str]:
    """Write the model of a checkpoint to one safetensors file, atomically.

    Tensors have the names of the model's `state_dict`. Of tied tensors, the first by name is
    stored; the others are listed in the metadata, as by `safetensors.torch.save_model`.

    Args:
        path: The checkpoint.
        file: The file to write; its folder must exist.
        force: Replace an existing file.

    Returns:
        The names of entries that are not tensors, which such a file cannot store.

    Raises:
        TargetError: If the file exists, or its name is invalid.
        CheckpointError: If the checkpoint is damaged or has no model, or the file cannot be
            written.

    Cost: The model in host memory.
    """
    file = Path(file)
    _check_target(file, force)
    return _write(read_part(Path(path), MODEL), file, f"the model of {str(path)!r}", force=force)


def tied_in(file: Path) -> dict[str, str]:
    """Return the tied weights that a file lists: their names, and the stored names."""
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        metadata = json.loads(opened.read(length))[METADATA]
    return {name: kept for name, kept in metadata.items() if name != "format"}


def write_weights(state: Mapping[str, Any], file: str | Path, *, force: bool = False) -> list[str]:
    """Write a model's state to one safetensors file, like `export`.

    Args:
        state: The result of `state_dict`; tensors with the same memory are stored once.
        file: The file to write; its folder must exist.
        force: Replace an existing file.

    Returns:
        The names of entries that are not tensors, which such a file cannot store.

    Raises:
        TargetError: If the file exists, or its name is invalid.
        CheckpointError: If the state has no tensors, or the file cannot be written.

    Cost: No copy of tensors in host memory.
    """
    file = Path(file)
    _check_target(file, force)
    encoder = StateEncoder({MODEL: state})
    untied = decode(encoder.state_json, encoder.tensors)[MODEL]
    return _write(untied, file, "the state", force=force)


def _write(state: Any, file: Path, name: str, *, force: bool) -> list[str]:
    tensors, rest = _tensors_of(state)
    if not tensors:
        raise CheckpointError(f"{str(file)!r} was not written: {name} has no tensors.")
    kept, aliases = _untied(tensors)
    _check_dtypes(kept)
    part = file.with_name(hidden_name("tmp", file.name))
    try:
        write_file(part, bytes_of(kept, aliases))
        _check_target(file, force)
        _give_name(part, file)
    except OSError as error:
        raise CheckpointError(
            f"{str(file)!r} could not be written: {folder_reason(file.parent, error)}. Check "
            f"permissions and free disk space."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return rest


def _check_target(file: Path, force: bool) -> None:
    if file.suffix != SUFFIX:
        raise TargetError(f"{str(file)!r} must end in {SUFFIX}.")
    if file.is_dir() or not file.parent.is_dir():
        raise TargetError(
            f"{str(file)!r} must be a file in an existing folder. Create the folder, or pass "
            f"another path."
        )
    if os.path.lexists(file) and not force:
        raise TargetError(
            f"{str(file)!r} already exists. Use another name, or force=True (--force)."
        )


def read_part(path: Path, key: str) -> Any:
    """Read one key of a checkpoint's state, and nothing else.

    `key`: key of the state, such as "model".

    Raises:
        CheckpointError: If the data is damaged, or the state has no such key.
    """
    state = load(path, keys={key})
    if key not in state:
        raise CheckpointError(
            f"The state in checkpoint {str(path)!r} has no key {key!r}. A Trainer saves the model "
            f"under 'model'. To list what a checkpoint contains, run: modelzoo-trainer checkpoint "
            f"info {path}"
        )
    return state[key]


def _tensors_of(value: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a nested state by name, and the names of other values."""
    tensors: dict[str, Tensor] = {}
    rest: list[str] = []
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, item = waiting.pop()
        if isinstance(item, Mapping):
            prefix = f"{name}." if name else ""
            waiting += [(f"{prefix}{key}", item[key]) for key in reversed(list(item))]
        elif isinstance(item, Tensor):
            tensors[name] = item
        else:
            rest.append(name)
    return tensors, rest


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, and the stored names of aliases."""
    first: dict[int, str] = {}
    aliases = {}
    for name in sorted(tensors):
        kept = first.setdefault(id(tensors[name]), name)
        if kept != name:
            aliases[name] = kept
    return {name: tensors[name] for name in tensors if name not in aliases}, aliases


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    known = {dtype for dtype, _ in DTYPES.values()}
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in known:
            problem = f"{name} has dtype {tensor.dtype}, which safetensors does not support."
            raise CheckpointError(problem)


def _give_name(part: Path, file: Path) -> None:
    """Rename a file; undo that if the new name may not be durable."""
    is_new = not os.path.lexists(file)
    disk.rename(part, file)
    try:
        disk.sync_folder(file.parent)
    except OSError:
        if is_new:
            with suppress(OSError):
                disk.unlink(file)
        raise
