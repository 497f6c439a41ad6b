"""Weights from files that are no checkpoints: safetensors, alone or in shards with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from modelzoo_trainer.checkpointing.checked_file import open_checked
from modelzoo_trainer.checkpointing.manifest import MANIFEST, STATE
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.tensor_file import checked_tensors
from modelzoo_trainer.errors import CheckpointError

SUFFIX: Final = ".safetensors"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_MAX_INDEX_BYTES: Final = 1 << 28
_OF_CHECKPOINTS: Final = (MANIFEST, STATE, SHARDS)
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT: Final = (
    "Convert it where you trust it: safetensors.torch.save_model(model, 'model.safetensors')."
)


def holds_weights(path: Path) -> bool:
    """Return whether a path is meant for `read_weights`, and is no checkpoint.

    A folder is if it has weights in it, if only as a pickle that `read_weights` refuses. A
    checkpoint that was never committed is still none.
    """
    if not path.is_dir():
        return path.exists()
    if _is_checkpoint(path):
        return False
    return any(
        entry.name in (SINGLE, INDEX) or entry.suffix.lower() in _PICKLES
        for entry in path.iterdir()
    )


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or was to become one."""
    is_unfinished = folder.name.startswith((".tmp-", ".trash-"))
    return is_unfinished or any((folder / name).exists() for name in _OF_CHECKPOINTS)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a folder in the layout of Hugging Face.

    Nothing is unpickled and nothing of the files stays mapped. Names that a file lists as other
    names of a tensor (tied weights, as `safetensors.torch.save_model` writes them) are in it.

    Args:
        path: The file; or a folder with model.safetensors, or with model.safetensors.index.json
            and the files that it names, which must lie beside it.

    Raises:
        CheckpointError: If it is not there, not a safetensors file, damaged, a pickle, or an
            index that leads outside or does not fit its files.

    Cost: Reads each file once; there is no digest, so a changed bit goes unnoticed.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix.lower() in _PICKLES:
        raise CheckpointError(
            f"{str(path)!r} is a pickle, which may run code when it is read. {_CONVERT}"
        )
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} is neither a file nor a folder.")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return _read_file(path)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if _is_checkpoint(folder):
        raise CheckpointError(
            f"{str(folder)!r} is a checkpoint, not a folder of weights. Load it as one, or write "
            f"its weights to a file first: python -m modelzoo_trainer.checkpointing export "
            f"{folder} model.safetensors"
        )
    if (folder / SINGLE).is_file():
        return _read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder / INDEX)
    raise CheckpointError(_what_is_there(folder))


def _what_is_there(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if pickles:
        return (
            f"{str(folder)!r} has only {pickles[0]!r}, a pickle, which may run code when it is "
            f"read. {_CONVERT}"
        )
    files = [name for name in names if name.endswith(SUFFIX)]
    hint = f" Give one of its files: {', '.join(files[:5])}." if files else ""
    return f"{str(folder)!r} has neither {SINGLE} nor {INDEX}.{hint}"


def _read_file(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for header, name, tensor in checked_tensors(_file_of(path), None, lambda name: True):
        tensors[name] = tensor
        aliases = header.metadata
    for alias, name in aliases.items():
        if name in tensors:
            tensors.setdefault(alias, tensors[name])
    return tensors


def _file_of(path: Path) -> Path:
    """Return the file itself: Hugging Face's cache has links to its files."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = _places(index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        for name, tensor in _read_file(index.parent / shard).items():
            if places.get(name, shard) == shard:
                tensors.setdefault(name, tensor)
    missing = [name for name, shard in places.items() if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{str(index)!r} names {missing[0]!r} in {places[missing[0]]!r}, which does not have "
            f"it ({len(missing)} such names). Fetch the files again."
        )
    return tensors


def _places(index: Path) -> dict[str, str]:
    """Return which file each tensor is in."""
    with open_checked(_file_of(index), None) as file:
        if file.size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {file.size} bytes, too many for an index")
        places = json.loads(file.read(file.size))["weight_map"]
        outside = [shard for shard in _values(places) if not _SHARD.fullmatch(shard)]
        if outside:
            raise CheckpointError(
                f"{str(index)!r} names the file {outside[0]!r}; they must be .safetensors files "
                f"beside it."
            )
        return dict(places)


def _values(places: Any) -> Iterator[str]:
    if not isinstance(places, dict) or not places:
        raise ValueError("its weight_map does not say which file has which tensor")
    for shard in places.values():
        if not isinstance(shard, str):
            raise ValueError(f"its weight_map names the file {shard!r}")
        yield shard
