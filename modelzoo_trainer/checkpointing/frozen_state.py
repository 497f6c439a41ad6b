"""A state frozen in the memory of this process, and the other process that writes it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.checkpointing.frozen_memory import (
    LEAST_PROTECTED,
    Range,
    are_private,
    can_protect,
    covers,
    protect,
    register,
    split,
    use_huge_pages,
)
from modelzoo_trainer.checkpointing.frozen_messages import BEGIN, END, receive, send
from modelzoo_trainer.checkpointing.manifest import FileRecord

_MODULE: Final = "modelzoo_trainer.checkpointing.frozen_writer"
_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[6:]; "
    f"from {_MODULE} import serve; serve(*map(int, sys.argv[1:5]), limit_s=float(sys.argv[5]))"
)
_START_S: Final = 60.0
_COPY_S: Final = 60.0  # a copy of 100 GiB takes about 20 s
_END_S: Final = 5.0


class WriterProcess:
    """The process that writes; it lives until `close`, or until this process is gone.

    It is ended, too, if it does not copy a state within a minute.

    Raises:
        OSError: If it cannot be started, or may not read the memory of this process.
    """

    def __init__(self) -> None:
        own, other = socket.socketpair()
        guard, self._guarded = socket.socketpair()
        with own, other, guard:
            self._channel = own.dup()
            passed = other.fileno(), guard.fileno(), self._guarded.fileno()
            arguments = [*map(str, passed), str(os.getpid()), str(_COPY_S), *sys.path]
            # A session of its own: signals to the run's processes do not end it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
            )
        self.pid = self._process.pid
        channels = self._channel, self._guarded
        self.close = weakref.finalize(self, _end, channels, self._process, os.getpid())
        self._checked: list[Range] = []
        probe = ctypes.c_char(b"x")
        try:
            self.ask({"try": ctypes.addressof(probe)}, _START_S)
        except BaseException:
            self.close()
            raise

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Check memory that will be frozen, and make freezing it faster; once.

        Raises:
            OSError: If the process has no memory for a copy.
        """
        pages, _ = split(map(_range, tensors))
        if pages != self._checked:
            self._checked = pages if are_private(pages) else []
            use_huge_pages(self._checked)
            self.ask({"room": sum(length for _, length in self._checked)})

    def freeze(self, tensors: Iterable[Tensor]) -> FrozenState | None:
        """Freeze tensors until they are copied; None = their memory was not checked by `prepare`.

        `tensors`: as `can_freeze` requires.

        Raises:
            OSError: If their memory cannot be protected; then nothing has changed.
        """
        kept = [tensor.detach() for tensor in tensors]
        pages, rest = split(map(_range, kept))
        if not covers(self._checked, pages):
            return None
        shared = _shared_copy(rest)
        try:
            fault = register(pages)
            try:
                self._guarded.sendall(BEGIN)
                send(self._channel, {"serve": pages, "copied": rest}, (fault, shared))
                protect(fault, pages)
            finally:
                os.close(fault)  # the other process has it, or all of it is released
            send(self._channel, {})
        finally:
            os.close(shared)
        return FrozenState(self, kept)

    def ask(self, message: dict[str, Any] | None, limit_s: float | None = None) -> dict[str, Any]:
        """Send a message, if any, and return the next answer.

        Raises:
            OSError: If the process reports one, or is gone.
        """
        try:
            self._channel.settimeout(limit_s)
            if message is not None:
                send(self._channel, message)
            answer, _ = receive(self._channel)
        except (EOFError, ConnectionError, TimeoutError, ValueError) as error:
            hangs = isinstance(error, TimeoutError)
            raise OSError(0, f"the process that writes it {self._end(hangs=hangs)}") from None
        if "error" in answer:
            if not answer["number"]:  # not an error of the system: copy the next state instead
                self.close()
            raise OSError(answer["number"], answer["error"], answer["file"])
        found: dict[str, Any] = answer
        return found

    def _is_ended_by_guard(self) -> bool:
        with suppress(OSError):
            return self._guarded.recv(1, socket.MSG_DONTWAIT) == END
        return False

    def _end(self, *, hangs: bool) -> str:
        """End the process, and return how it ended."""
        hangs = hangs or self._is_ended_by_guard()
        self.close()
        code = self._process.returncode
        if hangs:
            return "did not answer"
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        return f"exited with code {code}" if name is None else f"was ended by {name}"


class FrozenState:
    """Tensors whose values are those of the time when they were frozen."""

    def __init__(self, process: WriterProcess, tensors: Sequence[Tensor]) -> None:
        self._process = process
        self._tensors: Sequence[Tensor] | None = tensors  # keep the memory until it is copied

    @property
    def is_served(self) -> bool:
        """Whether the other process still answers."""
        return self._process.close.alive

    def wait(self) -> None:
        """Wait until the other process has copied the state.

        Raises:
            OSError: If it cannot.
        """
        if self._tensors is not None:
            self._process.ask(None)
            self._tensors = None

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """Let the other process write a file, as `file_writing.write_file` does.

        `chunks`: bytes, and memory of the frozen tensors; their present values do not matter.

        Raises:
            OSError: If writing fails, or the process is gone.
        """
        pieces = list(_pieces(chunks))
        self.wait()
        answer = self._process.ask({"write": os.path.abspath(path), "pieces": pieces})
        return FileRecord(size_bytes=answer["size"], xxh3_128=answer["digest"])


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[str | Range]:
    for chunk in chunks:
        if isinstance(chunk, bytes):
            yield chunk.decode("latin-1")
        elif len(chunk):
            yield _address(chunk), chunk.nbytes


def _range(tensor: Tensor) -> Range:
    return tensor.data_ptr(), tensor.nbytes


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


def _shared_copy(ranges: Sequence[Range]) -> int:
    """Return the descriptor of memory with copies of some ranges, one after the other."""
    shared = os.memfd_create("state")
    num_bytes = sum(length for _, length in ranges)
    if num_bytes:
        os.ftruncate(shared, num_bytes)
        with mmap.mmap(shared, num_bytes) as memory:
            place = ctypes.addressof(anchor := ctypes.c_char.from_buffer(memory))
            for address, length in ranges:
                ctypes.memmove(place, address, length)
                place += length
            del anchor  # the map cannot be closed otherwise
    return shared


def can_freeze(tensors: Iterable[Tensor]) -> bool:
    """Return whether memory can be frozen: of contiguous tensors that only this process writes."""
    return can_protect() and all(map(_is_own, tensors))


def compact(tensor: Tensor) -> Tensor:
    """Make a small tensor contiguous: it would keep all others from being frozen."""
    return tensor.contiguous() if tensor.nbytes < LEAST_PROTECTED else tensor


def _is_own(tensor: Tensor) -> bool:
    is_plain = tensor.device == torch.empty(0).device and tensor.is_contiguous()
    # A device may write to pinned memory, other processes to shared memory: past any protection.
    is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and not (tensor.is_pinned() or tensor.is_shared())  # type: ignore[no-untyped-call]  # torch's


def _end(channels: Iterable[socket.socket], process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the channels, whereupon the process ends; called once."""
    for channel in channels:
        channel.close()
    if os.getpid() != owner:  # a forked copy of this object
        process.returncode = 0
        return
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
