"""Lines of metrics, as a trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def losses(num: int, *, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return lines of metrics: a loss that falls, and a validation every ten steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, num + 1):
        now = 1_700_000_000.0 + step
        lines.append({"step": step, "time": now, "loss": scale / step, "lr/0": 0.1})
        if step % 10 == 0:
            lines.append({"step": step, "time": now, "validate_0/accuracy": 1 - scale / step})
    return lines


def to_text(lines: Iterable[Mapping[str, Any] | str]) -> str:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
