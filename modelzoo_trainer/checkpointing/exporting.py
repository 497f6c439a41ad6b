"""Weights for others: one safetensors file, as Hugging Face's loaders expect it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.checked_file import checked_json, record_of_name
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.manifest import STATE, Manifest, check_listing, read_manifest
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.sharded import load_sharded
from modelzoo_trainer.checkpointing.state_json import Encoder, decode
from modelzoo_trainer.checkpointing.tensor_file import bytes_of, checked_tensors
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, LENGTH_BYTES, METADATA
from modelzoo_trainer.checkpointing.transaction import write_file
from modelzoo_trainer.checkpointing.weights import SUFFIX
from modelzoo_trainer.errors import CheckpointError

MODEL: Final = "model"  # the key of the state


class TargetError(CheckpointError):
    """The file that is to be written has a name that does not do."""


def export(path: Path, file: Path, *, force: bool = False) -> list[str]:
    """Write the model of a checkpoint to one safetensors file, or leave things as they were.

    Tensors are called as in the model's `state_dict`. Of tied ones the first by name is stored;
    the others are named in the file's metadata, as `safetensors.torch.save_model` does it.

    Args:
        path: The checkpoint.
        file: Where to; its folder must exist.
        force: Replace a file that is there.

    Returns:
        What the model's state has besides tensors, which such a file cannot hold.

    Raises:
        TargetError: If the file exists, or cannot be a file of weights.
        CheckpointError: If what is read of the checkpoint is not intact, it has no model, or the
            file cannot be written.

    Cost: The model in host memory.
    """
    _check_target(file, force)
    return _write(read_part(path, MODEL), file, f"the model of {str(path)!r}", force=force)


def tied_in(file: Path) -> dict[str, str]:
    """Return the tied weights that a file does not store: their names, and under which they are."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        metadata = json.loads(opened.read(length))[METADATA]
    return {name: kept for name, kept in metadata.items() if name != "format"}


def write_weights(state: Mapping[str, Any], file: Path, *, force: bool = False) -> list[str]:
    """Write a model's state to one safetensors file, as `export` does with that of a checkpoint.

    Args:
        state: What `state_dict` returns; tensors that are the same memory are stored once.
        file: Where to; its folder must exist.
        force: Replace a file that is there.

    Returns:
        What the state has besides tensors, which such a file cannot hold.

    Raises:
        TargetError: If the file exists, or cannot be a file of weights.
        CheckpointError: If the state has no tensors, or the file cannot be written.

    Cost: No copy of what is in host memory.
    """
    _check_target(file, force)
    encoder = Encoder({MODEL: state})
    untied = decode(encoder.state_json, encoder.tensors)[MODEL]
    return _write(untied, file, "the state", force=force)


def _write(state: Any, file: Path, name: str, *, force: bool) -> list[str]:
    tensors, rest = _tensors_of(state)
    if not tensors:
        raise CheckpointError(f"{name} has no tensors.")
    kept, aliases = _untied(tensors)
    part = file.with_name(hidden_name("tmp", file.name))
    try:
        write_file(part, _content(kept, {"format": "pt", **aliases}))
        _check_target(file, force)
        _give_name(part, file)
    except OSError as error:
        raise CheckpointError(
            f"{str(file)!r} could not be written: {error.strerror or error}."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return rest


def _check_target(file: Path, force: bool) -> None:
    if file.suffix != SUFFIX:
        raise TargetError(f"{str(file)!r} must end in {SUFFIX}: that is what is written.")
    if file.is_dir() or not file.parent.is_dir():
        raise TargetError(f"{str(file)!r} must be a file in a folder that is there.")
    if os.path.lexists(file) and not force:
        raise TargetError(f"{str(file)!r} exists. Give another name, or --force.")


def read_part(path: Path, key: str) -> Any:
    """Return what one key of a checkpoint's state holds, reading nothing else.

    `key`: of the state, such as "model".

    Raises:
        CheckpointError: If what is read is not intact, or the state has no such key.
    """
    manifest = read_manifest(path)
    check_listing(path, manifest)
    if SHARDS in manifest.files:
        state = load_sharded(path, manifest, keys={key})
    else:
        state = _read_whole(path, manifest, key)
    if key not in state:
        raise CheckpointError(f"{str(path)!r} has no {key!r}; it was not saved by a trainer.")
    return state[key]


def _read_whole(path: Path, manifest: Manifest, key: str) -> dict[str, Any]:
    state_json = checked_json(path / STATE, record_of_name(manifest.files, STATE))
    if not isinstance(state_json, dict) or key not in state_json:
        return {}
    needed: dict[str, set[str]] = {}
    for stem, name in _references(state_json[key]):
        needed.setdefault(stem, set()).add(name)
    tensors: dict[str, dict[str, Tensor]] = {}
    for stem, names in needed.items():
        file = stem + SUFFIX
        record = record_of_name(manifest.files, file)
        found = checked_tensors(path / file, record, names.__contains__)
        tensors[stem] = {name: tensor for _, name, tensor in found}
    return decode({key: state_json[key]}, tensors)


def _references(state_json: Any) -> Iterator[tuple[str, str]]:
    """Yield the file and name of each tensor that a part of `state.json` refers to."""
    waiting = [state_json]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("__type__") in ("tensor", "complex"):
                yield str(value.get("file")), str(value.get("name"))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _tensors_of(value: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a nested state by name, and what else is in it."""
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
    """Return each tensor once, and under which name the others are."""
    first: dict[int, str] = {}
    aliases = {}
    for name in sorted(tensors):
        kept = first.setdefault(id(tensors[name]), name)
        if kept != name:
            aliases[name] = kept
    return {name: tensors[name] for name in tensors if name not in aliases}, aliases


def _content(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file as `bytes_of` does, with metadata of its own."""
    known = {dtype for dtype, _ in DTYPES.values()}
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in known:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors files lack.")
    chunks = bytes_of(tensors)
    next(chunks)
    header = json.loads(bytes(next(chunks))) | {METADATA: metadata}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % LENGTH_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    yield from chunks


def _give_name(part: Path, file: Path) -> None:
    """Rename a file, and take a new name back if it may not last."""
    is_new = not os.path.lexists(file)
    disk.rename(part, file)
    try:
        disk.sync_folder(file.parent)
    except OSError:
        if is_new:
            with suppress(OSError):
                disk.unlink(file)
        raise
