"""Batched reads: the values of many steps are fetched in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from typing_extensions import override

from ..reads import Landed, Reads, Values, host_value

Capture = Callable[[Tensor], Any]
Fetch = Callable[[list[Any]], list[Tensor]]

_SHORT: Final = 2  # steps: such a short lag is kept exactly
_MANY: Final = 1 << 20  # elements: more are not kept on the device


class BatchedReads(Reads):
    """Values that stay on the device until one of them is needed soon.

    Then all are fetched in one transfer, one step later, while the device works on the next step.
    Otherwise they are fetched when the oldest is `lag` steps old.

    `snapshot` captures a tensor's value, even if the tensor changes; `fetch` copies captures to the
    host in one transfer, and waits for the device. Tensors not of `kind` are already on the host.
    """

    def __init__(self, lag: int, snapshot: Capture, fetch: Fetch, kind: str) -> None:
        super().__init__(lag)
        self.num_reads = 0
        self.num_transfers = 0
        self._snapshot = snapshot
        self._fetch = fetch
        self._kind = kind
        self._num_urgent = 0  # steps whose values are needed soon
        self._num_due = 0  # of these, steps to fetch next
        self._num_elements = 0

    @override
    def capture(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return snapshots; for host tensors, their values."""
        self.num_reads += 1
        captured: list[Any] = []
        for tensor in tensors:
            if tensor.device.type == self._kind:
                captured.append((self._snapshot(tensor), tensor.numel()))
                self._num_elements += tensor.numel()
            else:
                captured.append(_Known(host_value(tensor)))
        return captured

    @override
    def ship(self, captured: list[list[Any]]) -> list[list[Any]]:
        """Return the captures: nothing is copied yet."""
        return captured

    @override
    def land(self, shipped: list[list[Any]]) -> list[Values]:
        """Fetch the values of one step; `_bring` fetches several steps."""
        [landed] = self._land_all([shipped])
        return landed

    @override
    def expedite(self) -> None:
        self._num_urgent = len(self._shipped) + bool(self._open)
        self._num_due = self._num_due or self._num_urgent

    @override
    def clear(self) -> None:
        super().clear()
        self._num_urgent = self._num_due = self._num_elements = 0

    @override
    def _deliver(self, keep: int) -> None:
        if self._delivering:
            return
        num = len(self._shipped)
        if keep == self.lag > _SHORT:
            keep = self._num_to_keep(num)
        if num > keep:
            self._bring(num - keep)
            self._num_urgent = self._num_due = max(0, self._num_urgent - (num - keep))
        super()._deliver(keep)

    def _num_to_keep(self, num: int) -> int:
        """Return how many of the last steps stay on the device at the end of one."""
        is_due = 0 < self._num_due < num
        if is_due or num > self.lag or self._num_elements > _MANY:
            return 1  # the step just launched
        return num

    def _bring(self, num: int) -> None:
        """Fetch the reads of the first `num` steps, in one transfer."""
        due = [
            (idx, shipped)
            for idx, (shipped, delivers) in enumerate(self._shipped)
            if idx < num and delivers and not isinstance(shipped, Landed)
        ]
        if not due:
            return
        for (idx, _), values in zip(due, self._land_all([item for _, item in due]), strict=True):
            self._shipped[idx] = (Landed(values), self._shipped[idx][1])

    def _land_all(self, steps: list[list[list[Any]]]) -> list[list[Values]]:
        items = [item for captured in steps for read in captured for item in read]
        snapshots = [item for item in items if not isinstance(item, _Known)]
        fetched = iter(self._fetch([snapshot for snapshot, _ in snapshots]) if snapshots else ())
        self._num_elements -= sum(num for _, num in snapshots)
        self.num_transfers += bool(snapshots)

        def value(item: Any) -> Any:
            return item.value if isinstance(item, _Known) else host_value(next(fetched))

        return [[[value(item) for item in read] for read in captured] for captured in steps]


@dataclass(frozen=True, slots=True)
class _Known:
    """A value already on the host."""

    value: Any
