"""Background saves: copy the state, then write it in a thread."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.base.devices import can_pin, map_tensors
from modelzoo_trainer.checkpointing.load_save import write_state
from modelzoo_trainer.checkpointing.state_json import StateEncoder, Tensors
from modelzoo_trainer.checkpointing.tensor_file import as_bytes
from modelzoo_trainer.checkpointing.transaction import (
    CheckpointTransaction,
    check_step,
    plain_facts,
)

_ALIGNMENT: Final = 64  # bytes: a cache line
_SLICE: Final = 1 << 24  # bytes that one thread copies at a time
_MAX_THREADS: Final = 4  # more threads do not increase bandwidth


class HostBuffer:
    """Reusable memory for one state at a time: touching fresh pages costs more than the copy.

    Grows when a state needs more, and shrinks when one needs less than half of it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes held."""
        return 0 if self._memory is None else self._memory.nbytes

    def copy(self, tensors: Tensors) -> Tensors:
        """Return copies of tensors; they overwrite the copies of the previous call.

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
            self._memory = None  # free first: never hold two buffers
            self._memory, self._is_pinned = _new_memory(needed, is_pinned), is_pinned
        return self._memory


def _new_memory(num_bytes: int, is_pinned: bool) -> Tensor:
    if is_pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the device copies from pageable memory
            pass
    # Shared: private memory would be copied page by page after every fork.
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


def _resolved(tensor: Tensor) -> Tensor:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if is_lazy else tensor


@dataclass(slots=True)
class _Flight:
    """One save in progress and its result."""

    path: Path
    thread: threading.Thread | None = None
    error: BaseException | None = None
    pid: int = field(default_factory=os.getpid)

    def is_over(self) -> bool:
        """Return whether writing has ended; in a forked process it never started."""
        return self.thread is None or not self.thread.is_alive()


class BackgroundSaver:
    """Write one checkpoint at a time in a thread, from a private copy of the state.

    The memory of the copy is reused. A save in progress is finished when the program ends. The
    thread exists only during a save and does no torch computation, so a process forked meanwhile
    finds no lock held.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._stager: Any = None
        self._flight: _Flight | None = None
        self._committed: list[Path] = []
        self._errors: list[BaseException] = []
        self.stall_s = 0.0
        """Total time that callers were blocked, in seconds."""

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in progress."""
        return self._flight is not None and not self._flight.is_over()

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        step: SupportsIndex,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy a state and start writing it; wait first if a save is in progress.

        `collect` and `wait` report the result, and raise errors of earlier saves.

        Args:
            path: The checkpoint; must not exist.
            state: What to save; may be changed after this call returns.
            step: The global step, >= 0.
            facts: Additional entries of the manifest.

        Raises:
            CheckpointError: If the name is in use, the state has a value that cannot be saved, or
                the folder cannot be created.

        Cost: Host memory for a whole state, kept. Waits for the device.
        """
        with self._stalling():
            self._land()
            plain_step, plain = check_step(step), plain_facts(facts or {})
            encoded = StateEncoder(state)
            transaction = CheckpointTransaction(path)
            try:
                tensors = self._buffer.copy(encoded.tensors)
                self._fly(
                    path,
                    lambda: write_state(transaction, encoded, plain_step, plain, tensors=tensors),
                )
            except BaseException:
                transaction.discard()
                raise

    def save_sharded(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        step: SupportsIndex,
        process_group: Any,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Like `save`, together with other ranks. Collective.

        Args:
            path: As for `save`; equal on all ranks.
            state: As for `checkpointing.save_sharded`.
            step: The global step, >= 0.
            process_group: The ranks that save; must not be used elsewhere.
            facts: Additional entries of the manifest.

        Cost: As for `save`, for this rank's part.
        """
        from modelzoo_trainer.checkpointing.distributed import save_sharded

        with self._stalling():
            self._land()
            plain_step, plain_ones = check_step(step), plain_facts(facts or {})
            copied = self._staged(state)

            def write() -> None:
                save_sharded(
                    path, copied, step=plain_step, facts=plain_ones, process_group=process_group
                )

            self._fly(path, write)

    def _staged(self, state: Mapping[str, Any]) -> Any:
        """Return a copy of a state of several ranks."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            pins = can_pin()  # then all copies are queued, and waited for once
            options = StagingOptions(
                use_pinned_memory=pins,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pins,
            )
            self._stager = DefaultStager(options)
        # Resolved: the copies of torch would lack the conjugation or the sign of a lazy view.
        return self._stager.stage(map_tensors(dict(state), _resolved))

    def _fly(self, path: Path, write: Callable[[], None]) -> None:
        """Write in a thread."""
        flight = _Flight(path=path)

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  # raised by `collect` or `wait`
                flight.error = error

        # Not a daemon: the interpreter waits for it before it exits.
        flight.thread = threading.Thread(target=run, name=f"save {path.name}")
        flight.thread.start()
        self._flight = flight

    def collect(self) -> list[Path]:
        """Return the checkpoints committed since the last call of this or `wait`.

        Raises:
            CheckpointError: If a save has failed; once per save.
        """
        if not self.is_busy:
            self._land()
        if self._errors:
            raise self._errors.pop(0)
        committed, self._committed = self._committed, []
        return committed

    def wait(self) -> list[Path]:
        """Wait for the save in progress; return the checkpoints committed since the last call.

        Raises:
            CheckpointError: If a save has failed; once per save.
        """
        with self._stalling():
            self._land()
        return self.collect()

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - begin

    def _land(self) -> None:
        """Wait for the save in progress, and record its result."""
        flight = self._flight
        if flight is None:
            return
        if flight.thread is not None:
            flight.thread.join()
        self._flight = None
        if flight.pid != os.getpid():
            return
        if flight.error is None:
            self._committed.append(flight.path)
        else:
            self._errors.append(flight.error)
