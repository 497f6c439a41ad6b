"""Write-protect memory of this process until another process has copied it (userfaultfd, Linux).

A write to a protected page, of any kind, waits until that page is copied: about a millisecond, and
only in the short time in which the copy is being made.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from bisect import bisect
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, Final

PAGE: Final = 4096
HUGE: Final = 1 << 21
LEAST_PROTECTED: Final = 1 << 18  # bytes; copying less is faster than protecting it

# From linux/userfaultfd.h and asm-generic/mman-common.h, the same on all machines below.
_SYSCALLS: Final = {"x86_64": 323, "aarch64": 282}
_DEVICE: Final = "/dev/userfaultfd"
_NEW: Final = 0xAA00
_API: Final = 0xC018AA3F
_REGISTER: Final = 0xC020AA00
PROTECT: Final = 0xC018AA06
_VERSION: Final = 0xAA
_WP: Final = 1 << 0
_WP_UNPOPULATED: Final = 1 << 13  # Linux 6.4
_MODE_WP: Final = 1 << 1
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25  # Linux 6.1

Range = tuple[int, int]  # address, bytes


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@cache
def can_protect() -> bool:
    """Return whether this process may protect its memory.

    Requires Linux 6.4, and CAP_SYS_PTRACE, access to `/dev/userfaultfd`, or
    `vm.unprivileged_userfaultfd=1`: without these, a system call that writes to protected memory
    would fail instead of waiting.
    """
    if sys.platform != "linux" or os.sysconf("SC_PAGE_SIZE") != PAGE:
        return False
    try:
        os.close(_open())
    except OSError:
        return False
    return True


def _open() -> int:
    """Return a new descriptor of userfaultfd."""
    import fcntl

    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        number = _SYSCALLS.get(platform.machine())
        found = -1 if number is None else _libc().syscall(number, flags)
        if found < 0:
            raise OSError(ctypes.get_errno(), "no userfaultfd") from None
    else:
        try:
            found = fcntl.ioctl(device, _NEW, flags)
        finally:
            os.close(device)
    try:
        fcntl.ioctl(found, _API, bytearray(struct.pack("QQQ", _VERSION, _WP | _WP_UNPOPULATED, 0)))
    except OSError:
        os.close(found)
        raise
    return int(found)


def register(ranges: Iterable[Range]) -> int:
    """Return a descriptor by which whole pages can be protected and released.

    All are released when the last copy of the descriptor is closed, so also when the processes that
    have it are killed.

    Raises:
        OSError: If some of it cannot be protected, such as a mapped file.
    """
    import fcntl

    found = _open()
    try:
        for begin, length in ranges:
            given = bytearray(struct.pack("QQQQ", begin, length, _MODE_WP, 0))
            fcntl.ioctl(found, _REGISTER, given)
    except OSError:
        os.close(found)
        raise
    return found


def protect(descriptor: int, ranges: Iterable[Range]) -> None:
    """Write-protect registered pages.

    From then on, a thread that writes to one waits, maybe with the interpreter's lock: who serves
    the descriptor must be ready before, and must not need this process.

    Raises:
        OSError: If the kernel refuses.
    """
    import fcntl

    for begin, length in ranges:
        fcntl.ioctl(descriptor, PROTECT, bytearray(struct.pack("QQQ", begin, length, 1)))


def split(ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """Return disjoint ranges of whole pages that are worth protecting, and the rest.

    A page between two tensors, which has the end of one and the start of the other, is protected
    with them, and so is what else it holds: to leave it out would split a huge page.
    """
    known = merged(ranges)
    pages = []
    for begin, length in _joined(known):
        first, last = -(-begin // PAGE) * PAGE, (begin + length) // PAGE * PAGE
        if last - first >= LEAST_PROTECTED:
            pages.append((first, last - first))
    return pages, _without(known, pages)


def _joined(ranges: list[Range]) -> list[Range]:
    """Return disjoint, sorted ranges, as one where no whole page lies between them."""
    found: list[Range] = []
    for begin, length in ranges:
        if found and begin // PAGE <= -(-sum(found[-1]) // PAGE):
            found[-1] = found[-1][0], begin + length - found[-1][0]
        else:
            found.append((begin, length))
    return found


def _without(ranges: list[Range], pages: list[Range]) -> list[Range]:
    """Return what of disjoint, sorted ranges is not in others of that kind."""
    rest = []
    ends = [sum(page) for page in pages]
    for begin, length in ranges:
        end = begin + length
        for first, size in pages[bisect(ends, begin) :]:
            if begin >= end or first >= end:
                break
            if begin < first:
                rest.append((begin, first - begin))
            begin = first + size
        if begin < end:
            rest.append((begin, end - begin))
    return rest


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges as disjoint ones, in order of their addresses."""
    found: list[Range] = []
    for begin, length in sorted(ranges):
        if not length:
            continue
        if found and begin <= sum(found[-1]):
            known, end = found[-1][0], max(sum(found[-1]), begin + length)
            found[-1] = known, end - known
        else:
            found.append((begin, length))
    return found


def are_private(ranges: Iterable[Range]) -> bool:
    """Return whether disjoint ranges are memory of this process alone, and of no file."""
    private = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, rights, _, _, inode, *_ = line.split()
            if rights == "rw-p" and inode == "0":
                begin, end = (int(number, 16) for number in place.split("-"))
                private.append((begin, end - begin))
    return covers(merged(private), ranges)


def covers(known: list[Range], ranges: Iterable[Range]) -> bool:
    """Return whether each range lies within one of the disjoint, sorted ones in `known`."""
    starts = [begin for begin, _ in known]
    for begin, length in ranges:
        number = bisect(starts, begin) - 1
        if number < 0 or begin + length > sum(known[number]):
            return False
    return True


def use_huge_pages(ranges: Iterable[Range]) -> None:
    """Ask the kernel to move memory into huge pages: they are protected ten times as fast."""
    libc = _libc()
    blocks = ((a // HUGE * HUGE, -(-(a + n) // HUGE) * HUGE - a // HUGE * HUGE) for a, n in ranges)
    for begin, length in merged(blocks):
        for block in range(begin, begin + length, HUGE):
            with suppress(ValueError):
                place, size = ctypes.c_void_p(block), ctypes.c_size_t(HUGE)
                libc.madvise(place, size, _MADV_HUGEPAGE)
                libc.madvise(place, size, _MADV_COLLAPSE)  # refused: the pages stay small
