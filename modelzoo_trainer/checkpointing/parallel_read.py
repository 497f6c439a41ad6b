"""Reading a file by several threads at once, in order for who looks at the bytes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

from modelzoo_trainer.checkpointing import disk

CHUNK: Final = 1 << 22  # bytes: read at once, then looked at while they are in the cache
NUM_AHEAD: Final = 8  # chunks read before the one that is looked at
_NUM_THREADS: Final = 2  # one waits for the disk while another copies; the caller looks
_MAX_VIEWS: Final = 512  # the system takes no more than 1024 in one call

_Job: TypeAlias = list[memoryview]


def fill(fd: int, views: Iterable[memoryview], look: Callable[[memoryview], object]) -> None:
    """Fill `views` with the next bytes of a file.

    Args:
        fd: The file.
        views: Where to; taken one after the other, at most `NUM_AHEAD` chunks before their turn.
        look: Called with what was read, in order, by the calling thread.

    Raises:
        ValueError: If the file ends before all are full.
        OSError: If the disk refuses.
    """
    position = os.lseek(fd, 0, os.SEEK_CUR)
    waiting: deque[tuple[_Job, Future[None]]] = deque()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            for job in _jobs(views):
                if len(waiting) == NUM_AHEAD:
                    _take(waiting, look)
                waiting.append((job, pool.submit(_read, fd, job, position)))
                position += sum(map(len, job))
            while waiting:
                _take(waiting, look)
        finally:
            for _, future in waiting:
                future.cancel()
    os.lseek(fd, position, os.SEEK_SET)


def _jobs(views: Iterable[memoryview]) -> Iterator[_Job]:
    """Yield views of one chunk together: large ones in parts, small ones gathered."""
    job: _Job = []
    room = CHUNK
    for view in views:
        for begin in range(0, len(view), CHUNK):
            part = view[begin : begin + CHUNK]
            if job and (len(part) > room or len(job) == _MAX_VIEWS):
                yield job
                job, room = [], CHUNK
            job.append(part)
            room -= len(part)
    if job:
        yield job


def _read(fd: int, job: _Job, position: int) -> None:
    if disk.read_at(fd, job, position) != sum(map(len, job)):
        raise ValueError("it ends within a tensor")


def _take(waiting: deque[tuple[_Job, Future[None]]], look: Callable[[memoryview], object]) -> None:
    job, future = waiting.popleft()
    future.result()
    for view in job:
        look(view)
