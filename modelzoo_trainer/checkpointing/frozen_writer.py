"""The process that copies the memory of a run and writes it to files. Imports no torch.

It copies protected memory page by page, those first that the run wants to write to, and gives each
back at once. It ends when the run closes the channel or is gone. A second process, its guard, ends
it if a copy takes too long: every thread of the run may be waiting for it, so none of them can.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any, Final

from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.frozen_memory import HUGE, PROTECT
from modelzoo_trainer.checkpointing.frozen_messages import BEGIN, END, receive, send

_STRIDE: Final = 2 * HUGE  # bytes copied and given back at a time
_MESSAGE: Final = 32  # bytes, of userfaultfd; the address is at 16
_POLL_S: Final = 0.1
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Copier:
    """Copies of memory of another process, found by the addresses that it has there."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._memory: mmap.mmap | None = None
        self._places: list[tuple[int, int, memoryview]] = []  # address, bytes, copy

    def read(self, address: int, target: memoryview) -> None:
        """Copy memory of the other process.

        Raises:
            OSError: If it is not readable.
        """
        own = _Iovec(ctypes.addressof(ctypes.c_char.from_buffer(target)), len(target))
        other, one = _Iovec(address, len(target)), ctypes.c_ulong(1)
        num_bytes = self._libc.process_vm_readv(
            self._pid, ctypes.byref(own), one, ctypes.byref(other), one, ctypes.c_ulong(0)
        )
        if num_bytes != len(target):
            number = ctypes.get_errno()
            raise OSError(number, f"memory of the run cannot be read: {os.strerror(number)}")

    def take(self, protected: list[list[int]], fault: int, channel: socket.socket) -> None:
        """Copy memory that is being protected, and give it back.

        Until the next message says that all of it is protected, only what is waited for: a thread
        of the run that waits may keep the run from sending that message.
        """
        pieces: list[tuple[int, int, memoryview]] = []
        memory = self._room_for(sum(length for _, length in protected))
        at = 0
        self._places = []
        for address, length in protected:
            target = memory[at : at + length]
            self._places.append((address, length, target))
            pieces += _strides(address, target)
            at += length
        starts = [address for address, _, _ in pieces]
        copy = self._copier(pieces, fault)
        while channel.fileno() not in select([channel.fileno(), fault], [], [])[0]:
            for address in _wanted(fault):
                copy(bisect(starts, address) - 1)
        receive(channel)
        for number in range(len(pieces)):
            for address in _wanted(fault):
                copy(bisect(starts, address) - 1)
            copy(number)

    def keep(self, copied: list[list[int]], shared: int) -> None:
        """Add ranges whose content is in a file, one after the other."""
        if copied:
            end = sum(length for _, length in copied)
            content = memoryview(mmap.mmap(shared, end, prot=mmap.PROT_READ))
            at = 0
            for address, length in copied:
                self._places.append((address, length, content[at : at + length]))
                at += length
        self._places.sort(key=lambda place: place[:2])

    def make_room(self, num_bytes: int) -> None:
        """Have memory for copies ready; the first copy would wait for it otherwise."""
        self._room_for(num_bytes)
        assert self._memory is not None
        with suppress(OSError):
            self._memory.madvise(_MADV_POPULATE_WRITE)

    def _room_for(self, num_bytes: int) -> memoryview:
        fits = self._memory is not None and num_bytes <= len(self._memory) <= 2 * num_bytes
        if not fits:
            self._places, self._memory = [], None
            self._memory = mmap.mmap(
                -1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        assert self._memory is not None
        return memoryview(self._memory)

    def _copier(
        self, pieces: list[tuple[int, int, memoryview]], fault: int
    ) -> Callable[[int], None]:
        """Return a function that copies a piece and gives it back; once."""
        import fcntl

        done = [False] * len(pieces)

        def copy(number: int) -> None:
            if not done[number]:
                address, length, target = pieces[number]
                self.read(address, target)
                fcntl.ioctl(fault, PROTECT, struct.pack("QQQ", address, length, 0))
                done[number] = True

        return copy

    def chunks(self, pieces: list[Any]) -> Iterator[bytes | memoryview]:
        """Yield the content of a file: text, or copies by their address and length.

        Raises:
            LookupError: If memory was not copied.
        """
        starts = [place[0] for place in self._places]
        for piece in pieces:
            if isinstance(piece, str):
                yield piece.encode("latin-1")
            else:
                yield from self._copies(starts, *piece)

    def _copies(self, starts: list[int], address: int, length: int) -> Iterator[memoryview]:
        while length:
            number = bisect(starts, address) - 1
            found = memoryview(b"")
            if number >= 0:
                begin, _, copy = self._places[number]
                found = copy[address - begin : address - begin + length]
            if not len(found):
                raise LookupError(f"{length} bytes at {address:#x} were not copied")
            yield found
            address, length = address + len(found), length - len(found)


def _strides(address: int, target: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield pieces that end at multiples of the stride, so that huge pages stay whole."""
    end = address + len(target)
    begin = address
    while begin < end:
        stop = min(end, (begin // _STRIDE + 1) * _STRIDE)
        yield begin, stop - begin, target[begin - address : stop - address]
        begin = stop


def _wanted(fault: int) -> Iterator[int]:
    """Yield the addresses at which the other process waits."""
    while True:
        try:
            message = os.read(fault, _MESSAGE)
        except BlockingIOError:
            return
        yield struct.unpack_from("Q", message, 16)[0]


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _start_guard(guard: int, held: Iterable[int], limit_s: float) -> None:
    """Start the process that ends this one if END does not follow BEGIN in time.

    `guard`: where it reads them; `held`: descriptors that it must not have.
    """
    writer = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            os.setsid()
            for descriptor in held:
                os.close(descriptor)
            _guard(guard, writer, limit_s)
        finally:
            os._exit(0)
    os.close(writer)
    os.close(guard)


def _guard(guard: int, writer: int, limit_s: float) -> None:
    message = END
    while True:
        ready, _, _ = select([guard, writer], [], [], limit_s if message == BEGIN else None)
        if not ready:
            os.write(guard, END)  # for the run: why it ended
            signal.pidfd_send_signal(writer, signal.SIGKILL)
        if guard not in ready or writer in ready:
            return
        message = os.read(guard, 1)


def _answer(
    copier: Copier,
    channel: socket.socket,
    guarded: int,
    message: dict[str, Any],
    descriptors: list[int],
) -> dict[str, Any]:
    try:
        if "write" in message:
            record = write_file(Path(message["write"]), copier.chunks(message["pieces"]))
            return {"size": record.size_bytes, "digest": record.xxh3_128}
        if "room" in message:
            copier.make_room(message["room"])
        elif "try" in message:
            copier.read(message["try"], memoryview(bytearray(1)))
        else:
            fault, shared = descriptors
            copier.take(message["serve"], fault, channel)
            copier.keep(message["copied"], shared)
    except OSError as error:
        return {"number": error.errno, "error": error.strerror, "file": error.filename}
    except (LookupError, MemoryError) as error:
        return {"number": 0, "error": f"{type(error).__name__}: {error}", "file": None}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        if descriptors:
            with suppress(OSError):  # the guard is gone
                os.write(guarded, END)
    return {}


def serve(descriptor: int, guard: int, guarded: int, parent: int, limit_s: float) -> None:
    """Answer messages until the channel is closed.

    Args:
        descriptor: The channel, a socket.
        guard: Where the guard reads, a socket.
        guarded: Its other end, which the run has, too.
        parent: The run's process.
        limit_s: The time for a copy, in seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a stop waits for the save under way
    _start_guard(guard, (descriptor, guarded), limit_s)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    copier = Copier(parent)
    with suppress(EOFError, ConnectionError):
        while True:
            send(channel, _answer(copier, channel, guarded, *receive(channel, 2)))
    os._exit(0)
