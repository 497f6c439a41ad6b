"""Copy batches to the device one ahead of their use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .placement import map_tensors
from .reads import can_pin, has_events


class Lane(ABC):
    """Copies batches to the device."""

    pins: ClassVar[bool] = False
    """Whether it copies from pinned memory."""

    @abstractmethod
    def start(self, batch: Any) -> Any:
        """Start copying a batch; return a handle."""

    @abstractmethod
    def finish(self, copying: Any) -> Any:
        """Return the batch, ready for subsequent computations."""

    @abstractmethod
    def release_source(self, copying: Any) -> None:
        """Wait until the batch's source may be overwritten."""


class PlainLane(Lane):
    """Copies that complete in `start`."""

    def __init__(self, place: Callable[[Any], Any]) -> None:
        self._place = place

    def start(self, batch: Any) -> Any:
        """Return the batch on the device."""
        return self._place(batch)

    def finish(self, copying: Any) -> Any:
        """Return the batch."""
        return copying

    def release_source(self, copying: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Copying:
    batch: Any
    copied: torch.Event
    sources: list[Tensor]  # pinned source memory


class StreamLane(Lane):
    """Copies from pinned memory in a separate stream, overlapping with computations.

    Requires an accelerator for which `has_streams` is true.
    """

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def start(self, batch: Any) -> _Copying:
        """Pin the batch's tensors and queue their copies."""
        sources: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                return tensor  # copied in `finish`
            source = tensor if tensor.is_pinned() else tensor.pin_memory()
            sources.append(source)
            return source.to(self._device, non_blocking=True)

        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            return _Copying(map_tensors(batch, copy), self._stream.record_event(), sources)
        finally:
            torch.accelerator.set_stream(before)

    def finish(self, copying: _Copying) -> Any:
        """Make the current stream wait for the copies; copy the remaining tensors."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copying.copied)

        def take(tensor: Tensor) -> Tensor:
            if tensor.device != self._device:
                return tensor.to(self._device)
            # The copying stream owns the memory: it must not be reused before this stream is done.
            tensor.record_stream(current)
            return tensor

        return map_tensors(copying.batch, take, lambda item: item.to(self._device))

    def release_source(self, copying: _Copying) -> None:
        """Wait for the copies, but not for computations."""
        copying.copied.synchronize()
        copying.sources.clear()


def has_streams(device: torch.device) -> bool:
    """Return whether copies can overlap with computations on a device."""
    if device.type == "cpu" or not can_pin() or not has_events(device):
        return False
    try:
        torch.empty(1, device=device).record_stream(torch.Stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Fetched:
    copying: Any = None
    error: Exception | None = None


class LookAhead(Iterator[Any]):
    """Batches on the device; the next one is copied while one is in use.

    At most one batch is prefetched. Errors and the end of the loader are raised when the batch
    concerned is requested. The loader may overwrite a batch's memory once the next one is
    requested.
    """

    def __init__(self, batches: Iterable[Any], lane: Lane) -> None:
        self._batches = iter(batches)
        self._lane = lane
        self._ahead: _Fetched | None = None

    def __next__(self) -> Any:
        current = self._ahead or self._fetch()
        self._ahead = None
        if current.error is not None:
            raise current.error
        batch = ending_nothing(self._finish, current.copying)
        self._ahead = self._fetch()
        return batch

    def _finish(self, copying: Any) -> Any:
        batch = self._lane.finish(copying)
        self._lane.release_source(copying)
        return batch

    def _fetch(self) -> _Fetched:
        try:
            batch = next(self._batches)
            return _Fetched(ending_nothing(self._lane.start, batch))
        except Exception as error:  # noqa: BLE001  # raised at its place by __next__
            return _Fetched(error=error)


def placed(batches: Iterable[Any], place: Callable[[Any], Any]) -> Iterator[Any]:
    """Return an iterator over the batches on the device."""
    return map(partial(ending_nothing, place), batches)


def ending_nothing(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function; a StopIteration that it raises is an error, not the end of the batches."""
    try:
        return function(argument)
    except StopIteration as error:
        raise RuntimeError(
            "StopIteration was raised while a batch was moved to the device (by a method `to` or "
            "`pin_memory` of the batch?). It does not end an epoch. Raise another exception."
        ) from error
