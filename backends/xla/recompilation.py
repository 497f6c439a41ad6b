"""A watch over graphs that are compiled anew, and operations that fall back to the host."""

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

_EXPECTED: Final = 3  # steps of one kind that may compile: the state is not there in the first
_SHOWN: Final = 4


class RecompilationError(BackendError):
    """A step compiled its graph anew, and `recompilation: error` was asked for."""


class RecompilationWatch:
    """Finds steps that compile when nothing should be new any more, and says why.

    Steps are of one kind if they do the same (train, take the optimizer's step, validate) with
    batches of the same shapes. The first ones of a kind compile; later ones should not.

    The policy is "warn" = once for each cause, "error" = raise, or "ignore" = only count.
    `fallbacks` returns the names of operations that have run on the host, as they have no form for
    the device.
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
        """Those of the batch at hand."""
        self.num_late = 0
        """How many steps compiled that should not have."""
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
        """Count from now on."""
        self._seen = self._num_compiled()
        self._num_fallbacks = len(self._fallbacks())

    def pass_over(self) -> None:
        """Leave out what has been compiled since the last step: it belongs to none."""
        self._seen = self._num_compiled()

    def look(self, kind: Kind, *, ends_window: bool = True) -> None:
        """Judge a batch's step that has just been launched.

        `ends_window`: it is the last one before the optimizer's step, or the only one.

        Raises:
            RecompilationError: If it compiled when it should not have, and that is an error.
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
                "The device has no form of %s: it runs on the host, which waits for the device "
                "and cuts the step's graph. Use other operations in their place.",
                ", ".join(found),
            )


_OF_GRAPH: Final = (
    "A step has compiled its graph anew, though batches have the shapes that they had: something "
    "else in it is not as it was. A Python number that changes becomes a part of the graph (make "
    "it a tensor on the device), and so does an operation that runs in some steps only. With the "
    "environment variable PT_XLA_DEBUG_LEVEL=2 the runtime says which lines compile."
)


def _of_shapes(before: Shapes, now: Shapes) -> str:
    gone = [shape for shape in before if shape not in now]
    new = [shape for shape in now if shape not in before]
    return (
        f"A step has compiled its graph anew, as batches have other shapes: {_shown(new)} after "
        f"{_shown(gone)}. Each new shape costs a compilation, of seconds or minutes. Drop the last "
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
