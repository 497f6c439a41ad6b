"""Write tensors to a new folder of safetensors files, one at a time.

The files are planned from shapes: each tensor is written to its place as it comes. The folder has
a hidden name until all is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.folder import free_bytes, hidden_name
from modelzoo_trainer.checkpointing.lazy_weights import INDEX, SINGLE
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.tensor_header import DTYPES, LENGTH_BYTES, METADATA
from modelzoo_trainer.errors import CheckpointError, folder_reason, in_bytes

_NAMES: Final = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
_PIECE: Final = 1 << 24  # bytes per write


Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that has not been read."""

    shape: Shape
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class _Shard:
    """A file: its tensors and where they begin."""

    names: list[str] = field(default_factory=list)
    num_bytes: int = 0
    file: str = ""
    header: bytes = b""
    begins: dict[str, int] = field(default_factory=dict)  # from the start of the file


def num_bytes_of(specs: Mapping[str, TensorSpec]) -> int:
    """Return the size of tensors."""
    return sum(_num_bytes(spec) for spec in specs.values())


def _num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


def write_tensors(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int,
    aliases: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or several files and `model.safetensors.index.json`.

    Args:
        folder: An existing folder.
        specs: The tensors by name, in the order in which they come.
        tensors: Their values.
        shard_bytes: Maximum size of the tensors of a file; a larger tensor has a file of its own.
        aliases: Further names of tensors, for the metadata: tied weights.

    Returns:
        The files.

    Raises:
        OSError: If a file cannot be written.

    Cost: No copy of tensors in host memory.
    """
    shards = _planned(specs, shard_bytes, aliases or {})
    of_tensor = {name: shard for shard in shards for name in shard.names}
    open_file: tuple[_Shard, int] | None = None
    left = {*specs}
    try:
        for name, tensor in tensors:
            shard = of_tensor[name]
            if open_file is None or open_file[0] is not shard:
                if open_file is not None:
                    _close(open_file[1])
                open_file = shard, _open(folder, shard)
            _write(open_file[1], tensor, shard.begins[name])
            left.remove(name)
        if open_file is not None:
            fd, open_file = open_file[1], None
            _close(fd)
    finally:
        if open_file is not None:
            with suppress(OSError):  # keep the first error
                disk.close(open_file[1])
    if left:
        raise RuntimeError(f"tensors were not made: {sorted(left)[:3]}")
    files = [folder / shard.file for shard in shards]
    if len(shards) > 1:
        places = {name: shard.file for name, shard in of_tensor.items()}
        index = {"metadata": {"total_size": num_bytes_of(specs)}, "weight_map": places}
        files.append(write_json(folder / INDEX, index))
    return files


def _planned(
    specs: Mapping[str, TensorSpec], shard_bytes: int, aliases: Mapping[str, str]
) -> list[_Shard]:
    shards = [_Shard()]
    for name, spec in specs.items():
        size = _num_bytes(spec)
        if shards[-1].names and shards[-1].num_bytes + size > shard_bytes:
            shards.append(_Shard())
        shards[-1].names.append(name)
        shards[-1].num_bytes += size
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.file = several if len(shards) > 1 else SINGLE
        own = {alias: name for alias, name in aliases.items() if name in shard.names}
        _lay_out(shard, specs, own)
    return shards


def _lay_out(shard: _Shard, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
    """Make the header of a file; the widest dtype comes first, so that all are aligned."""
    header: dict[str, Any] = {METADATA: {"format": "pt", **aliases}}
    end = 0
    ordered = sorted(shard.names, key=lambda name: (-specs[name].dtype.itemsize, name))
    for name in ordered:
        spec = specs[name]
        begin, end = end, end + _num_bytes(spec)
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        shard.begins[name] = begin
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % LENGTH_BYTES)
    shard.header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    shard.begins = {name: begin + len(shard.header) for name, begin in shard.begins.items()}


def _open(folder: Path, shard: _Shard) -> int:
    path = folder / shard.file
    if path.exists():  # another tensor of it has been written
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    fd = disk.open_new(path)
    disk.write(fd, shard.header)
    return fd


def _write(fd: int, tensor: Tensor, begin: int) -> None:
    os.lseek(fd, begin, os.SEEK_SET)
    view = as_bytes(tensor.detach().cpu().contiguous())
    for start in range(0, len(view), _PIECE):
        piece = view[start : start + _PIECE]
        disk.write(fd, piece)
        disk.start_writing_back(fd, begin + start, len(piece))


def _close(fd: int) -> None:
    try:
        disk.sync(fd)
    finally:
        disk.close(fd)


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a JSON file durably and return its path."""
    return write_text(path, json.dumps(content, indent=2, sort_keys=False) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a new text file durably and return its path."""
    fd = disk.open_new(path)
    try:
        disk.write(fd, text.encode())
        disk.sync(fd)
    finally:
        disk.close(fd)
    return path


def check_target(folder: Path) -> None:
    """Refuse a target folder that exists, or whose parent does not.

    Raises:
        CheckpointError: With what to do.
    """
    if os.path.lexists(folder):
        raise CheckpointError(
            f"{str(folder)!r} already exists. Pass the path of a new folder, or remove that one."
        )
    if not folder.parent.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} cannot be made: {str(folder.parent)!r} is not a folder. Create it, "
            f"or pass another path."
        )


@contextmanager
def new_folder(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a hidden folder, which gets its name when the block ends without an error.

    Args:
        folder: The name; its parent must exist.
        num_bytes: What will be written, to refuse a full disk beforehand.

    Raises:
        CheckpointError: If the folder exists, or cannot be written; nothing is left of it.
    """
    with _hidden(folder, num_bytes) as hidden:
        disk.make_new_folder(hidden)
        yield hidden
        disk.sync_folder(hidden)


def save_file(file: Path, state: Any, num_bytes: int) -> None:
    """Write a file of torch.save; it has a hidden name until all is written.

    Raises:
        CheckpointError: As `new_folder`.
    """
    with _hidden(file, num_bytes) as hidden, hidden.open("xb") as opened:
        torch.save(state, opened)
        opened.flush()
        disk.sync(opened.fileno())


@contextmanager
def _hidden(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a hidden path beside the target, which gets its name at the end."""
    check_target(target)
    free = free_bytes(target.parent)
    if free is not None and free < num_bytes:
        raise CheckpointError(
            f"{str(target)!r} was not written: it needs {in_bytes(num_bytes)}, but "
            f"{in_bytes(free)} are free on its disk. Free space, pass another path, or use a "
            f"smaller --dtype."
        )
    hidden = target.with_name(hidden_name("tmp", target.name))
    try:
        yield hidden
        check_target(target)
        disk.rename(hidden, target)
        disk.sync_folder(target.parent)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "Free space on its disk" if is_full else "Check permissions and the disk"
        why = folder_reason(target.parent, error)
        raise CheckpointError(f"{str(target)!r} could not be written: {why}. {advice}.") from error
    finally:
        with suppress(OSError):
            if hidden.is_dir():
                disk.remove_tree(hidden)
            elif hidden.exists():
                disk.unlink(hidden)
