"""Download the files of checkpoints that a mirror lacks, when they are needed."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import quote

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.cache import make_room
from modelzoo_trainer.checkpointing.stores.mirror import MANIFEST, Mirror, attempt_of, located
from modelzoo_trainer.errors import CheckpointError, DamagedObject, NoSuchObject, StoreError

log = logging.getLogger("modelzoo_trainer.stores")

_NUM_THREADS: Final = 4
_POLL_S: Final = 0.05
_NUM_TRIES: Final = 10

_T = TypeVar("_T")


class SizeAndDigest(Protocol):
    """Size and digest of a file."""

    @property
    def size_bytes(self) -> int:
        """Size."""

    @property
    def xxh3_128(self) -> str:
        """Digest, in hex."""


def is_in_mirror(path: Path) -> bool:
    """Return whether missing files of a checkpoint may be in an object store."""
    return bool(located(path)[1])


def complete(path: Path, files: Mapping[str, SizeAndDigest]) -> None:
    """Download those files of a checkpoint that are missing; a no-op outside of a mirror.

    Several processes may call it at the same time: each file is downloaded once.

    Args:
        path: The checkpoint.
        files: Entries of its manifest.

    Raises:
        CheckpointError: If a file is missing in the store, or differs from its record.
        StoreError: If the store cannot be read, or there is no space in the mirror.
    """
    if all((path / name).exists() for name in files):
        return
    mirror, name = located(path)
    if mirror is None or not name:
        return
    with alone(mirror, name):
        missing = {file: files[file] for file in files if not (path / file).exists()}
        _check_space(mirror, path, sum(record.size_bytes for record in missing.values()))
        begin = time.perf_counter()
        try:
            attempt = attempt_of(read_bytes(path / MANIFEST))
        except OSError:
            return  # its reader reports that
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            jobs = [
                pool.submit(_fetch, mirror, f"{name}/{attempt}/{file}", path / file, record)
                for file, record in sorted(missing.items())
            ]
            for job in jobs:
                job.result()
        num_bytes = sum(record.size_bytes for record in missing.values())
        log.info(
            "Downloaded %d files (%.1f MB) of %s in %.1f s.",
            len(missing),
            num_bytes / 1e6,
            mirror.url_of(name),
            time.perf_counter() - begin,
        )


def opened(path: Path, files: Mapping[str, SizeAndDigest], open_files: Callable[[], _T]) -> _T:
    """Complete a checkpoint and return what a function opens of it.

    The uploads of a run bound the local copy, and may remove a file before it is opened. It is
    downloaded again then.

    Args:
        path: The checkpoint.
        files: Entries of its manifest, of the files that are opened.
        open_files: Opens them, and keeps them open.

    Raises:
        CheckpointError, StoreError: As `complete`.
        Exception: Raised by `open_files`; outside of a mirror at once.
    """
    num_left = _NUM_TRIES
    while True:
        complete(path, files)
        try:
            return open_files()
        except (FileNotFoundError, CheckpointError):
            num_left -= 1
            if not num_left or not is_in_mirror(path):
                raise


def _fetch(mirror: Mirror, name: str, target: Path, record: SizeAndDigest) -> None:
    """Download a file of a checkpoint, and make it visible when it is complete."""
    fresh = mirror.folder / f"download-{secrets.token_hex(8)}"
    try:
        mirror.store.download(name, fresh, record.size_bytes, record.xxh3_128)
        fresh.replace(target)
    except NoSuchObject as error:
        raise CheckpointError(
            f"Checkpoint {mirror.url_of(name.rsplit('/', 2)[0])!r} is not complete: {error} Use "
            f"another checkpoint."
        ) from error
    except DamagedObject as error:
        raise CheckpointError(f"{error}. Use another checkpoint.") from error
    except StoreError:
        raise
    except OSError as error:
        if not target.parent.is_dir():
            raise CheckpointError(
                f"{str(target.parent)!r} was deleted while it was read."
            ) from None
        raise _no_space(mirror, error.strerror or str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def _check_space(mirror: Mirror, path: Path, num_bytes: int) -> None:
    """Remove local copies that are in the store until a download fits.

    Raises:
        StoreError: If there is too little space even then.
    """
    if not make_room(mirror, num_bytes, keep=path):
        raise _no_space(mirror, f"{num_bytes / 1e9:.2f} GB are needed")


def _no_space(mirror: Mirror, why: str) -> StoreError:
    return StoreError(
        f"Files of '{mirror.url}' cannot be written to the local copy {str(mirror.path)!r}: {why}. "
        f"Free space there, or set trainer.init.object_store.cache_dir to another disk."
    )


@contextmanager
def alone(mirror: Mirror, name: str) -> Iterator[None]:
    """Keep other processes of this host from downloading the same checkpoint."""
    import fcntl

    folder = mirror.folder / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / quote(name, safe=""), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(fd)
