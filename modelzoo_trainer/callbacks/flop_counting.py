"""Counts floating-point operations while they happen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch


class FlopCount:
    """Counts the operations of everything that runs, from now until `stop`.

    They are those of matrix products, convolutions and attention, as `torch.utils.flop_counter`
    counts them. What is compiled runs uncompiled meanwhile: the counter sees into no graph, and a
    function that torch first met under a counter would never be compiled.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        counter = FlopCounterMode(display=False, custom_mapping=_attention_formulas())
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # what is asked of one
        self._counter = self._stack.enter_context(counter)
        self._num_left_out = 0
        _OPEN.append(self)
        self._stack.callback(_OPEN.remove, self)

    @property
    def total(self) -> int:
        """How many there were."""
        return int(self._counter.get_total_flops()) - self._num_left_out

    def leave_out(self, num: int) -> None:
        """Take back some that were counted."""
        self._num_left_out += num

    def stop(self) -> None:
        """Count no more."""
        self._stack.close()


_OPEN: Final[list[FlopCount]] = []


@contextmanager
def uncounted() -> Iterator[None]:
    """Have the operations inside counted by nobody: they measure the model, they are not its."""
    before = [(count, count.total) for count in _OPEN]
    try:
        yield
    finally:
        for count, total in before:
            count.leave_out(count.total - total)


class _NoModules:
    """Stands for torch's tracker of modules, which puts hooks on all modules of the process.

    Of these a compiled model warns, and nobody asks for the counts of single modules.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


def _attention_formulas() -> dict[Any, Any]:
    """Return formulas for the kernels of attention that torch's counter does not know."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

    found = {}
    for kernel in ("flash_attention_for_cpu", "fused_attention_overrideable"):
        for end, formula in (("", forward), ("_backward", backward)):
            packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{end}", None)
            if packet is not None and packet not in flop_registry:
                found[packet] = formula
    return found
