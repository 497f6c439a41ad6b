"""Deferred device reads: captured now, delivered later, in order."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Values: TypeAlias = list[Any]  # a number for each 0-d tensor, a CPU tensor for each other
Deliver: TypeAlias = Callable[[Values], None]


def host_value(tensor: Tensor) -> Any:
    """Return the value of a CPU tensor: a number if it is 0-d, else a copy."""
    return tensor.item() if tensor.dim() == 0 else tensor.detach().clone()


class Reads(ABC):
    """The queue of a backend's deferred reads.

    Reads of one step form a group: it is copied to the host at the end of the step, and delivered
    when `lag` more steps have ended, never earlier, so that a run does not depend on how busy the
    device is.
    """

    is_empty: bool
    """Whether no read is pending."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self.is_empty = True
        self._open: list[tuple[Any, Deliver]] = []
        self._shipped: deque[tuple[Any, list[Deliver]]] = deque()
        self._delivering = False

    @abstractmethod
    def capture(self, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of the tensors' current values, without waiting."""

    @abstractmethod
    def ship(self, captured: list[Any]) -> Any:
        """Start one transfer of all captures of a step; return a handle for `land`."""

    @abstractmethod
    def land(self, shipped: Any) -> list[Values]:
        """Return the values of a transfer, one list per capture; may wait for the device."""

    def put(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Add a read to the open group.

        The tensors may be changed afterwards.
        """
        self._open.append((self.capture(tensors), deliver))
        self.is_empty = False

    def end_group(self) -> None:
        """End a step's group and deliver groups that are `lag` steps old."""
        captured = [item for item, _ in self._open]
        delivers = [deliver for _, deliver in self._open]
        self._open = []
        self._shipped.append((self.ship(captured) if captured else None, delivers))
        self._deliver(self.lag)

    def flush(self) -> None:
        """Deliver everything, including reads added by deliveries."""
        while True:
            if self._open:
                self.end_group()
            self._deliver(0)
            if self._delivering or not self._open:
                return

    def expedite(self) -> None:  # noqa: B027  # a no-op without batching
        """Deliver all reads so far soon, where reads are batched."""

    def clear(self) -> None:
        """Drop pending reads."""
        self._open = []
        self._shipped.clear()
        self.is_empty = True

    def _deliver(self, keep: int) -> None:
        if self._delivering:  # called by a delivery: the outer call continues
            return
        self._delivering = True
        try:
            while len(self._shipped) > keep:
                shipped, delivers = self._shipped.popleft()
                if delivers:
                    self._hand_over(shipped, delivers)
        finally:
            self._delivering = False
            self.is_empty = not self._open and not self._shipped

    def _hand_over(self, shipped: Any, delivers: list[Deliver]) -> None:
        landed = shipped.values if isinstance(shipped, Landed) else self.land(shipped)
        pending = deque(zip(delivers, landed, strict=True))
        while pending:
            deliver, values = pending.popleft()
            try:
                deliver(values)
            except BaseException:
                # The next flush delivers the rest.
                if pending:
                    rest = Landed([values for _, values in pending])
                    self._shipped.appendleft((rest, [deliver for deliver, _ in pending]))
                raise


class Landed:
    """Values already on the host."""

    def __init__(self, values: list[Values]) -> None:
        self.values = values


class HostReads(Reads):
    """Reads on the host: values are available at once."""

    def capture(self, tensors: Sequence[Tensor]) -> Values:
        """Return the values."""
        return [host_value(tensor) for tensor in tensors]

    def ship(self, captured: list[Values]) -> list[Values]:
        """Return the captured values."""
        return captured

    def land(self, shipped: list[Values]) -> list[Values]:
        """Return the captured values."""
        return shipped


Wait: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Position of a captured tensor among the elements of its dtype."""

    dtype: torch.dtype
    start: int
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Captured:
    """One read: device elements packed by dtype, and host values."""

    slots: list[Any]
    packs: dict[torch.dtype, Tensor]


@dataclass(frozen=True, slots=True)
class Shipped:
    """One step's transfer: each read's slots and its number of elements by dtype."""

    reads: list[tuple[list[Any], dict[torch.dtype, int]]]
    packs: dict[torch.dtype, tuple[Tensor, Wait]]


class HostCopies:
    """Copies from a device to the host, asynchronous where supported.

    Pinned memory and events are tested at the first copy; without either, a copy waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_transfers = 0
        self._is_async: bool | None = None

    @property
    def is_async(self) -> bool:
        """Whether `start` returns before the values are available."""
        if self._is_async is None:
            self._is_async = self.device.type != "cpu" and can_pin() and has_events(self.device)
        return self._is_async

    def start(self, tensor: Tensor) -> tuple[Tensor, Wait]:
        """Start a copy; return its target and a function that waits for completion."""
        self.num_transfers += 1
        if not self.is_async:
            return tensor.to("cpu"), no_wait  # host read: waits for the device
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        target.copy_(tensor, non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return target, event.synchronize


class DeferredReads(Reads):
    """Reads of an asynchronous device."""

    def __init__(self, lag: int, copies: HostCopies) -> None:
        super().__init__(lag)
        self.copies = copies
        self.num_reads = 0

    def capture(self, tensors: Sequence[Tensor]) -> Captured:
        """Copy the values on the device; values of host tensors are read at once."""
        self.num_reads += 1
        kind = self.copies.device.type
        slots: list[Any] = []
        parts: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            if tensor.device.type != kind:
                slots.append(host_value(tensor))
                continue
            dtype = tensor.dtype
            start = sizes.get(dtype, 0)
            slots.append(_Slot(dtype, start, tensor.shape))
            sizes[dtype] = start + tensor.numel()
            parts.setdefault(dtype, []).append(tensor.detach().reshape(-1))
        return Captured(slots, {dtype: _pack(pieces, kind) for dtype, pieces in parts.items()})

    def ship(self, captured: list[Captured]) -> Shipped:
        """Start one transfer per dtype."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for item in captured:
            for dtype, pack in item.packs.items():
                parts.setdefault(dtype, []).append(pack)
        kind = self.copies.device.type
        packs = {
            dtype: self.copies.start(pieces[0] if len(pieces) == 1 else _pack(pieces, kind))
            for dtype, pieces in parts.items()
        }
        reads = [
            (item.slots, {dtype: pack.numel() for dtype, pack in item.packs.items()})
            for item in captured
        ]
        # Packs are released here: their memory is reused only after the copy, in stream order.
        return Shipped(reads, packs)

    def land(self, shipped: Shipped) -> list[Values]:
        """Wait for the transfer, which is `lag` steps old, and unpack it."""
        for _, wait in shipped.packs.values():
            wait()
        bases = dict.fromkeys(shipped.packs, 0)
        landed = []
        for slots, sizes in shipped.reads:
            landed.append([_value(slot, shipped, bases) for slot in slots])
            for dtype, size in sizes.items():
                bases[dtype] += size
        return landed


def can_pin() -> bool:
    """Return whether the host supports pinned memory for asynchronous copies."""
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def has_events(device: torch.device) -> bool:
    """Return whether the device supports events."""
    try:
        torch.Event(device).record()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def no_wait() -> None:
    """Return at once: the copy is complete."""


def _pack(pieces: list[Tensor], kind: str) -> Tensor:
    # Autocast would change the dtype of the concatenated tensors.
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with torch.no_grad(), torch.autocast(kind, enabled=False) if is_on else nullcontext():
        return torch.cat(pieces)  # always a copy


def _value(slot: Any, shipped: Shipped, bases: dict[torch.dtype, int]) -> Any:
    if not isinstance(slot, _Slot):
        return slot
    elements = shipped.packs[slot.dtype][0]
    start = bases[slot.dtype] + slot.start
    if not slot.shape:
        return elements[start].item()
    return elements[start : start + slot.shape.numel()].view(slot.shape).clone()
