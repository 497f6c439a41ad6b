"""The CPU backend."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from .backend import Backend, Caps, Region, overridden

_DEVICE: Final = torch.device("cpu")
_INLINED: Final = ("_enter_step", "_exit_step", "_seed_device", "_make_reads")


class _HostRegion(Region):
    """Like `Region`, but with as few calls as possible: it is entered for every batch.

    Only for backends that override none of the methods `_INLINED`.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        torch.default_generator.manual_seed(self.seed)
        self.backend.in_step = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        backend = self.backend
        backend.in_step = False
        if kind is None and not backend.reads.is_empty:
            backend.reads.end_group()


class CpuBackend(Backend):
    """The CPU: values are available at once, so reads are delivered at the step's end."""

    name = "cpu"
    caps = Caps(several_ranks=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        kind = type(self)
        self._moves = bool(overridden(kind, CpuBackend, ("device",)))
        self._places = bool(overridden(kind, CpuBackend, ("device", "to_device")))
        self._has_queue = bool(self._lag or overridden(kind, CpuBackend, ("read", "_make_reads")))

    @staticmethod
    def is_available() -> bool:
        """Return True."""
        return True

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return _DEVICE

    @property
    def reads_at_once(self) -> bool:
        """True outside a step, unless a lag was set or a subclass reads differently."""
        return not self.in_step and not self._has_queue and self.reads.is_empty

    def _make_region(self) -> Region:
        is_plain = not overridden(type(self), CpuBackend, _INLINED)
        return _HostRegion(self) if is_plain else Region(self)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches unchanged, unless a subclass has its own `device` or `to_device`."""
        return super().batches(batches) if self._places else iter(batches)

    def to_device(self, batch: Any) -> Any:
        """Return the batch unchanged, unless a subclass has its own `device`."""
        return super().to_device(batch) if self._moves else batch
