"""A dry run: shapes and dtypes without values, memory or time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .backend import Backend, Caps
from .reads import DeferredReads, HostCopies, Wait, no_wait

_DEVICE: Final = torch.device("meta")
_READ: Final = (
    "This line reads the value of a tensor (.item(), print, if) inside a step, which would block "
    "an accelerator; here it is on the meta device and has no value. Use trainer.log_metrics, "
    "trainer.read, @step_closure or torch.where (instead of an if or a boolean mask)."
)
_MIXED: Final = (
    "A tensor created on the CPU is combined with one of the model. Create it on the same device: "
    "torch.arange(n, device=x.device), or as a buffer of the module."
)
_MENTIONS_META: Final = re.compile(r"(?<![a-z])meta(?![a-z])", re.IGNORECASE)
_MENTIONS_MIXTURE: Final = re.compile(r"expected device|same device")


class MetaBackend(Backend):
    """The `meta` device: a whole run in which every tensor has a shape but no values.

    Finds wrong shapes, mixed devices, and host reads inside the step without the memory of the
    model: each such read raises, and `explain` adds advice. Values read through the backend are
    zero. Autocast has no effect, since torch does not support it here.
    """

    name = "meta"
    caps = Caps(static_shapes=True, holds_values=False)
    _never_called: ClassVar = {
        "_look": "tensors have no values; override optimizer_step and restore"
    }

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @property
    @override
    def device(self) -> torch.device:
        """The meta device."""
        return _DEVICE

    @override
    def building(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    @override
    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return self._nothing

    @override
    def _make_reads(self) -> DeferredReads:
        return DeferredReads(self._lag, _ZeroCopies(_DEVICE))

    @override
    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        super().optimizer_step(optimizer)  # a flag has no value: take every step

    @override
    def restore(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
        """Do nothing: there are no values to restore."""

    @override
    def host_state(self, tree: Any) -> Any:
        """Return the tree unchanged: there is nothing to copy."""
        return tree

    @override
    def explain(self, error: BaseException) -> None:
        super().explain(error)
        message = str(error)
        if not isinstance(error, (RuntimeError, TypeError)) or not _MENTIONS_META.search(message):
            return
        note = _MIXED if _MENTIONS_MIXTURE.search(message) else _READ
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class _ZeroCopies(HostCopies):
    """Zeros in place of missing values."""

    @override
    def start(self, tensor: Tensor) -> tuple[Tensor, Wait]:
        self.num_transfers += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype), no_wait
