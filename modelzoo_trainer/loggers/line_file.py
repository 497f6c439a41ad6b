"""A file of JSON lines that grows, and is cut back when a run goes back."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import IO, Any, Final

import xxhash

log = logging.getLogger("modelzoo_trainer.jsonl")

_STEP: Final = re.compile(rb'\{"step": (\d+), "time": ')
_TAIL_BYTES: Final = 1 << 16
_END_BYTES: Final = 1 << 20


def mark(path: Path) -> dict[str, Any]:
    """Return where a file ends, to cut it back to: its length, and a digest of what is before.

    Args:
        path: The file.

    Returns:
        `num_bytes`, and `tail`, the digest of at most the last 64 KiB. `num_bytes` is None if
        there is no way back: the file is none, or does not end with a line.
    """
    nowhere = {"num_bytes": None, "tail": ""}
    if path.exists() and not path.is_file():  # a pipe or device has no past
        return nowhere
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            tail = _before(file, num_bytes)
    except FileNotFoundError:
        return {"num_bytes": 0, "tail": _digest(b"")}
    except OSError:
        return nowhere
    if tail and not tail.endswith(b"\n"):
        return nowhere
    return {"num_bytes": num_bytes, "tail": _digest(tail)}


def cut_to(path: Path, place: dict[str, Any]) -> bool:
    """Cut a file back in place, if it is the one that was marked; return whether it was.

    An empty file cannot be told from others, so it is never taken for the one that was marked.

    Args:
        path: The file.
        place: What `mark` returned.
    """
    num_bytes = place.get("num_bytes")
    if not num_bytes or not path.is_file():
        return False
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes or _digest(_before(file, num_bytes)) != place.get("tail"):
            return False
        if size > num_bytes:
            file.truncate(num_bytes)
            os.fsync(file.fileno())
            log.info("Cut %s back from %d to %d bytes.", path, size, num_bytes)
    return True


def _before(file: IO[bytes], end: int) -> bytes:
    start = max(0, end - _TAIL_BYTES)
    file.seek(start)
    return file.read(end - start)


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps, and any that is not whole, at once or not at all.

    Args:
        path: The file; nothing happens if it is not there.
        step: The last one to keep.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    num_cut = 0
    with path.open("rb") as lines, fresh.open("xb") as kept:
        for line in lines:
            found = _step_of(line)
            if found is None or found > step:
                num_cut += 1
            else:
                kept.write(line)
        kept.flush()
        os.fsync(kept.fileno())
    if num_cut:
        fresh.replace(path)
        log.info("Removed %d lines after step %d from %s.", num_cut, step, path)
    else:
        fresh.unlink()


def put_aside(path: Path) -> Path | None:
    """Give a file another name, with the time in it, and return that.

    Args:
        path: The file; nothing happens, and None is returned, if it is empty or not there.
    """
    if not path.is_file() or path.stat().st_size == 0:  # a pipe or device has no past
        return None
    stem = aside = f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (fresh := path.with_name(aside + path.suffix)).exists():
        number += 1
        aside = f"{stem}_{number}"
    return path.rename(fresh)


def lines_from(path: Path, start: int, step: int) -> bytes:
    """Return the lines of a file from a place on, without those of later steps.

    Args:
        path: The file.
        start: The number of bytes before them.
        step: The last one that counts.
    """
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        found = [(_step_of(line), line) for line in file]
    return b"".join(line for own, line in found if own is not None and own <= step)


def end_last_line(path: Path) -> None:
    """Remove a last line that a crash cut off; end one that only lacks its newline.

    Args:
        path: The file; nothing happens if it is not there.
    """
    if not path.is_file():  # a pipe or device has no past
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _END_BYTES)
        file.seek(start)
        tail = file.read()
        if not tail or tail.endswith(b"\n"):
            return
        last = tail[tail.rfind(b"\n") + 1 :]
        if _step_of(last) is None:
            file.truncate(size - len(last))
        else:
            file.write(b"\n")


def _step_of(line: bytes) -> float | None:
    """Return the step of a line: none if it is not whole, before all if it is another's."""
    match = _STEP.match(line)
    if match is not None and line.endswith(b"}\n"):
        return int(match[1])
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else -math.inf
