"""What was found of an optimizer step, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

Batches = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """What was found of a step, on the host.

    Args:
        step: Its `global_step`.
        is_bad: Whether it is bad, on any process.
        batches: Epoch and index of each of its batches.
        loss: Their mean loss.
        norm: The norm of the gradients; None = not looked at.
        limit: The largest loss that is no spike; None = spikes were not looked for.
    """

    step: int
    is_bad: bool
    batches: Batches
    loss: float
    norm: float | None = None
    limit: float | None = None

    @property
    def complaint(self) -> str:
        """What is bad, and where, in one sentence without its full stop."""
        where = f"at global_step {self.step} ({named(self.batches)})"
        if not math.isfinite(self.loss):
            return f"loss is {self.loss} {where}"
        if self.norm is not None and not math.isfinite(self.norm):
            return f"the gradients' norm is {self.norm} {where}; the loss is {self.loss:.6g}"
        if self.limit is not None and self.loss > self.limit:
            return f"loss is {self.loss:.6g} {where}, a spike: at most {self.limit:.6g} is usual"
        return f"another process found loss or gradients bad {where}"


def named(batches: Batches) -> str:
    """Return batches as words, such as "epoch 0, batches 4-6"."""
    parts = []
    for epoch, places in groupby(batches, key=itemgetter(0)):
        idx = [place[1] for place in places]
        if len(idx) == 1:
            parts.append(f"epoch {epoch}, batch {idx[0]}")
        elif idx == list(range(idx[0], idx[0] + len(idx))):
            parts.append(f"epoch {epoch}, batches {idx[0]}-{idx[-1]}")
        else:
            parts.append(f"epoch {epoch}, batches {', '.join(map(str, idx))}")
    return "; ".join(parts)
