"""Detect recompiled graphs, and operations that fall back to the host."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from torch import Tensor

from ..errors import BackendError, check_choice

log = logging.getLogger("modelzoo_trainer.backends.recompilation")

Recompilation = Literal["warn", "error", "ignore"]
Shapes = tuple[str, ...]
Kind = tuple[object, ...]

_EXPECTED: Final = 3  # steps of one kind that may compile: the first has no state yet
_SHOWN: Final = 4


class RecompilationError(BackendError):
    """A step was recompiled, with `recompilation: error`."""


class RecompilationWatch:
    """Find steps that are recompiled unexpectedly, and report why.

    Steps are of one kind if they do the same (train, optimizer step, validate) with batches of the
    same shapes. The first steps of a kind compile; later ones should not.

    Policy: "warn" = once per cause, "error" = raise, "ignore" = only count. `fallbacks` returns the
    names of operations that ran on the host, as the device does not support them.
    """

    def __init__(
        self,
        policy: Recompilation,
        num_compiled: Callable[[], int],
        fallbacks: Callable[[], list[str]],
    ) -> None:
        check_choice("recompilation", policy, get_args(Recompilation))
        self.policy = policy
        self.shapes: Shapes = ()
        """Shapes of the current batch."""
        self.num_late = 0
        """Number of steps that were recompiled unexpectedly."""
        self._num_compiled = num_compiled
        self._fallbacks = fallbacks
        self._seen = 0
        self._num_fallbacks = 0
        self._counts: Counter[tuple[Kind, Shapes]] = Counter()
        self._num_windows = 0
        self._windows: dict[tuple[Kind, Shapes], int] = {}
        self._last_shapes: dict[Kind, Shapes] = {}
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Start counting."""
        self._seen = self._num_compiled()
        self._num_fallbacks = len(self._fallbacks())

    def skip_pending(self) -> None:
        """Ignore compilations since the last step: they belong to no step."""
        self._seen = self._num_compiled()

    def look(self, kind: Kind, *, ends_window: bool = True) -> None:
        """Check the step of a batch that was just launched.

        `ends_window`: it is the last one before the optimizer step, or the only one.

        Raises:
            RecompilationError: If it was recompiled unexpectedly, with policy "error".
        """
        shapes = self.shapes
        if self._windows.get((kind, shapes)) != self._num_windows:
            self._windows[kind, shapes] = self._num_windows
            self._counts[kind, shapes] += 1
        self._num_windows += ends_window
        before = self._last_shapes.get(kind)
        self._last_shapes[kind] = shapes
        num = self._num_compiled()
        if num != self._seen:
            self._seen = num
            self._judge(kind, shapes, before)
        names = self._fallbacks()
        if len(names) != self._num_fallbacks:
            self._report_fallbacks(names[self._num_fallbacks :])
            self._num_fallbacks = len(names)

    def _judge(self, kind: Kind, shapes: Shapes, before: Shapes | None) -> None:
        if before is not None and shapes != before and self._counts[kind, shapes] <= _EXPECTED:
            self._complain("shapes", _of_shapes(before, shapes))
        elif self._counts[kind, shapes] > _EXPECTED:
            self._complain("graph", _OF_GRAPH)

    def _complain(self, cause: str, message: str) -> None:
        self.num_late += 1
        if self.policy == "error":
            raise RecompilationError(message)
        if self.policy == "warn" and cause not in self._reported:
            self._reported.add(cause)
            log.warning("%s This is reported once.", message)

    def _report_fallbacks(self, names: list[str]) -> None:
        found = sorted(set(names))
        key = "fallback:" + ",".join(found)
        if self.policy != "ignore" and key not in self._reported:
            self._reported.add(key)
            log.warning(
                "Operations that the device does not support run on the CPU: %s. Each of them "
                "waits for the device and splits the step's graph. Use other operations instead.",
                ", ".join(found),
            )


_OF_GRAPH: Final = (
    "A step was recompiled although the shapes of batches have not changed. Usual causes: a Python "
    "number that changes from step to step (make it a tensor on the device), or an operation that "
    "runs in some steps only. Set the environment variable PT_XLA_DEBUG_LEVEL=2 to see which lines "
    "compile."
)


def _of_shapes(before: Shapes, now: Shapes) -> str:
    gone = [shape for shape in before if shape not in now]
    new = [shape for shape in now if shape not in before]
    return (
        f"A step was recompiled because the shapes of batches have changed: {_shown(new)} after "
        f"{_shown(gone)}. Each new shape costs a compilation of seconds or minutes. Drop the last "
        f"smaller batch (drop_last: true), or pad to a few lengths (PadToBuckets)."
    )


def _shown(shapes: list[str]) -> str:
    rest = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
    return ", ".join(shapes[:_SHOWN]) + rest or "nothing"


def shapes_of(batch: Any) -> Shapes:
    """Return the names and shapes of a batch's tensors, such as "input_ids (32, 64)"."""
    return tuple(f"{name} {shape}".lstrip(". ") for name, shape in _named_shapes(batch))


def _named_shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    if isinstance(batch, Tensor):
        return [("", tuple(batch.shape))]
    if isinstance(batch, Mapping):
        parts = [(f".{key}", _named_shapes(value)) for key, value in batch.items()]
    elif isinstance(batch, (tuple, list)):
        found = [(f"[{idx}]", _named_shapes(value)) for idx, value in enumerate(batch)]
        parts = [part for part in found if part[1]]
        if len(parts) == 1:
            return parts[0][1]
    else:
        return []
    return [(prefix + name, shape) for prefix, inner in parts for name, shape in inner]
