"""Read and write files of weights: safetensors, single or in shards, and files of torch.save."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.checked_file import checked_json, open_checked, record_of_name
from modelzoo_trainer.checkpointing.folder import hidden_name
from modelzoo_trainer.checkpointing.manifest import (
    MANIFEST,
    STATE,
    SUFFIX,
    Manifest,
    check_listing,
    read_manifest,
)
from modelzoo_trainer.checkpointing.shard_index import SHARDS
from modelzoo_trainer.checkpointing.sharded import load_sharded
from modelzoo_trainer.checkpointing.state_json import Encoder, decode
from modelzoo_trainer.checkpointing.tensor_file import bytes_of, checked_tensors
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, LENGTH_BYTES, METADATA
from modelzoo_trainer.checkpointing.torch_file import CONVERT, SUFFIXES, read_torch_file
from modelzoo_trainer.checkpointing.transaction import write_file
from modelzoo_trainer.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_OF_TORCH: Final = "pytorch_model.bin"  # Hugging Face's name for what torch.save has written
_INDEX_OF_TORCH: Final = "pytorch_model.bin.index.json"
_SHARD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")
_MAX_INDEX_BYTES: Final = 1 << 28
_OF_CHECKPOINTS: Final = (MANIFEST, STATE, SHARDS)
_PICKLES: Final = (".pkl", ".pickle")


def holds_weights(path: Path) -> bool:
    """Return whether a path is meant for `read_weights`, and is not a checkpoint.

    A folder is if it has weights, even if only in files that `read_weights` refuses. An uncommitted
    checkpoint is not.
    """
    if not path.is_dir():
        return path.exists()
    if _is_checkpoint(path):
        return False
    return any(
        entry.name in (SINGLE, INDEX) or entry.suffix.lower() in (*SUFFIXES, *_PICKLES)
        for entry in path.iterdir()
    )


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, committed or not."""
    is_unfinished = folder.name.startswith((".tmp-", ".trash-"))
    return is_unfinished or any((folder / name).exists() for name in _OF_CHECKPOINTS)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, or of a folder in the layout of Hugging Face.

    Nothing of a safetensors file is unpickled, and no file stays mapped. Includes names that the
    file's metadata lists as aliases of a tensor (tied weights, as written by
    `safetensors.torch.save_model`). A `.pt`, `.pth`, `.bin` or `.ckpt` file is read by
    `torch_file.read_torch_file`, with `weights_only=True`.

    Args:
        path: The file; or a folder with model.safetensors, or with model.safetensors.index.json
            and the files that it lists; otherwise with pytorch_model.bin or its index.

    Raises:
        CheckpointError: If it is missing, damaged, not a file of weights, one that torch cannot
            read safely, or an index that refers to files elsewhere or does not match its files.

    Cost: Reads each safetensors file once; there is no digest, so bit errors are not detected.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix.lower() in _PICKLES:
        raise CheckpointError(
            f"{str(path)!r} is a pickle, which may run code when loaded. {CONVERT}"
        )
    if not path.is_file():
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{str(path)!r} {problem}.")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    return _read_one(path)


def _read_one(path: Path) -> dict[str, Tensor]:
    if path.suffix.lower() in SUFFIXES:
        return read_torch_file(_file_of(path))
    return _read_file(path)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if _is_checkpoint(folder):
        raise CheckpointError(
            f"{str(folder)!r} is a checkpoint, not a folder of weights. Load it as a checkpoint, "
            f"or export its weights: modelzoo-trainer checkpoint export {folder} "
            f"model.safetensors"
        )
    if (folder / SINGLE).is_file():
        return _read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder / INDEX)
    if (folder / _OF_TORCH).is_file():
        return _read_one(folder / _OF_TORCH)
    if (folder / _INDEX_OF_TORCH).is_file():
        return _read_shards(folder / _INDEX_OF_TORCH)
    raise CheckpointError(_what_is_there(folder))


def _what_is_there(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if name.lower().endswith((SUFFIX, *SUFFIXES))]
    hint = f" Pass the path of one of its files: {', '.join(files[:5])}." if files else ""
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if pickles and not files:
        return (
            f"{str(folder)!r} has only {pickles[0]!r}, a pickle, which may run code when loaded. "
            f"{CONVERT}"
        )
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
    """Resolve links: Hugging Face's cache has links to its files."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from None


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = _places(index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        for name, tensor in _read_one(index.parent / shard).items():
            if places.get(name, shard) == shard:
                tensors.setdefault(name, tensor)
    missing = [name for name, shard in places.items() if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{str(index)!r} lists the tensor {missing[0]!r} in {places[missing[0]]!r}, but that "
            f"file does not have it (missing in total: {len(missing)}). Download the files again."
        )
    return tensors


def _places(index: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    with open_checked(_file_of(index), None) as file:
        if file.size > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {file.size} bytes, an index at most {_MAX_INDEX_BYTES}")
        places = json.loads(file.read(file.size))["weight_map"]
        outside = [shard for shard in _values(places) if not _SHARD.fullmatch(shard)]
        if outside:
            raise CheckpointError(
                f"{str(index)!r} lists the file {outside[0]!r}; expected names of .safetensors or "
                f".bin files in the same folder."
            )
        return dict(places)


def _values(places: Any) -> Iterator[str]:
    if not isinstance(places, dict) or not places:
        raise ValueError("weight_map must be a JSON object that maps tensor names to files")
    for shard in places.values():
        if not isinstance(shard, str):
            raise ValueError(f"weight_map must map tensor names to file names, got {shard!r}")
        yield shard


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
    with file.open("rb") as opened:
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
    encoder = Encoder({MODEL: state})
    untied = decode(encoder.state_json, encoder.tensors)[MODEL]
    return _write(untied, file, "the state", force=force)


def _write(state: Any, file: Path, name: str, *, force: bool) -> list[str]:
    tensors, rest = _tensors_of(state)
    if not tensors:
        raise CheckpointError(f"{str(file)!r} was not written: {name} has no tensors.")
    kept, aliases = _untied(tensors)
    part = file.with_name(hidden_name("tmp", file.name))
    try:
        write_file(part, _content(kept, {"format": "pt", **aliases}))
        _check_target(file, force)
        _give_name(part, file)
    except OSError as error:
        raise CheckpointError(
            f"{str(file)!r} could not be written: {error.strerror or error}. Check permissions "
            f"and free disk space."
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
    manifest = read_manifest(path)
    check_listing(path, manifest)
    if SHARDS in manifest.files:
        state = load_sharded(path, manifest, keys={key})
    else:
        state = _read_whole(path, manifest, key)
    if key not in state:
        raise CheckpointError(
            f"The state in checkpoint {str(path)!r} has no key {key!r}. A Trainer saves the model "
            f"under 'model'. To list what a checkpoint contains, run: modelzoo-trainer checkpoint "
            f"info {path}"
        )
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
    """Yield the file and name of each tensor referenced by a part of `state.json`."""
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


def _content(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file like `bytes_of`, with metadata."""
    known = {dtype for dtype, _ in DTYPES.values()}
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in known:
            problem = f"{name} has dtype {tensor.dtype}, which safetensors does not support."
            raise CheckpointError(problem)
    chunks = bytes_of(tensors)
    next(chunks)
    header = json.loads(bytes(next(chunks))) | {METADATA: metadata}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % LENGTH_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    yield from chunks


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
