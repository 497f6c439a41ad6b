"""Copies of tensors in memory of the host that is used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.state_json import Tensors
from modelzoo_trainer.checkpointing.tensor_file import as_bytes

_ALIGNMENT: Final = 64  # bytes: a line of the processor's cache
_SLICE: Final = 1 << 24  # bytes: what one thread copies at a time
_MAX_THREADS: Final = 4  # more do not make memory faster


class HostBuffer:
    """Memory that holds one state at a time: touching fresh pages costs more than the copy.

    It grows when a state needs more, and shrinks when one needs less than half of it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        """Return how much memory is held."""
        return 0 if self._memory is None else self._memory.nbytes

    def copy(self, tensors: Tensors) -> Tensors:
        """Return copies of tensors; those of the call before are overwritten.

        Args:
            tensors: By file and name, on any device.

        Cost: Waits for the device. No more than the copy if the buffer fits.
        """
        every = [tensor for named in tensors.values() for tensor in named.values()]
        memory = self._room_for(every)
        places = iter(_places(memory, every))
        copies: Tensors = {
            stem: {name: next(places) for name in named} for stem, named in tensors.items()
        }
        _copy(every, [copy for named in copies.values() for copy in named.values()])
        return copies

    def _room_for(self, tensors: list[Tensor]) -> Tensor:
        needed = max(sum(map(_padded, tensors)), 1)
        is_pinned = any(tensor.device != torch.empty(0).device for tensor in tensors)
        fits = needed <= self.num_bytes <= 2 * needed and is_pinned == self._is_pinned
        if self._memory is None or not fits:
            self._memory = None  # first: never two of them
            self._memory, self._is_pinned = _new_memory(needed, is_pinned), is_pinned
        return self._memory


def _new_memory(num_bytes: int, is_pinned: bool) -> Tensor:
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the device copies from any memory
            pass
    # Shared: memory of one's own would have to be copied page by page after every fork.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(memory: Tensor, tensors: list[Tensor]) -> Iterator[Tensor]:
    begin = 0
    for tensor in tensors:
        part = memory[begin : begin + tensor.nbytes]
        yield part.view(tensor.dtype).view(tensor.shape)
        begin += _padded(tensor)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    slices: list[tuple[memoryview, memoryview]] = []
    for source, target in zip(sources, targets, strict=True):
        if source.device == target.device and source.is_contiguous():
            slices += _slices(as_bytes(source), as_bytes(target))
        else:
            target.copy_(source)
    # Not by torch: its threads wait for each other at every tensor, these never do.
    num_threads = min(_MAX_THREADS, torch.get_num_threads())
    if num_threads == 1 or len(slices) < 2 * num_threads:
        for pair in slices:
            _copy_slice(pair)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(_copy_slice, slices))


def _slices(source: memoryview, target: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    for begin in range(0, len(source), _SLICE):
        yield source[begin : begin + _SLICE], target[begin : begin + _SLICE]


def _copy_slice(pair: tuple[memoryview, memoryview]) -> None:
    source, target = pair
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
