"""The CPU backend."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from .backend import Backend, Caps, Region

_DEVICE: Final = torch.device("cpu")


class _HostRegion(Region):
    """Like `Region`, but with as few calls as possible: it is entered for every batch."""

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
        """True outside a step, unless a lag was set."""
        return not self.in_step and self._lag == 0 and self.reads.is_empty

    def _make_region(self) -> Region:
        return _HostRegion(self)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches unchanged."""
        return iter(batches)

    def to_device(self, batch: Any) -> Any:
        """Return the batch unchanged."""
        return batch
