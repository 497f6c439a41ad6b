"""A sha256 of whatever a run consists of, in which every bit counts."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor


def digest(value: Any) -> str:
    """Return a sha256 of nested values, in which every bit counts."""
    found = sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(f"{key!r}:".encode())
            _feed(found, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(found, item)
    elif isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    else:
        found.update(f"{value.hex() if isinstance(value, float) else value!r};".encode())


def metrics_digest(path: Path) -> str:
    """Return a sha256 of a metrics file without its times."""
    found = sha256()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        del record["time"]
        found.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return found.hexdigest()
