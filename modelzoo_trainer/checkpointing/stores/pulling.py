"""Bring a mirror up to date with its store when a run starts."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.listing import Listing, is_safe
from modelzoo_trainer.checkpointing.stores.mirror import (
    ATTEMPT,
    MANIFEST,
    NUM_DIGITS,
    Mirror,
    attempt_of,
    checkpoints_in,
    declared_attempt,
    files_of,
)
from modelzoo_trainer.checkpointing.stores.reading import is_in_mirror
from modelzoo_trainer.checkpointing.stores.record import (
    MirrorRecord,
    SentFile,
    deletions,
    write_atomically,
)
from modelzoo_trainer.checkpointing.stores.store import StoredObject
from modelzoo_trainer.errors import NoCheckpoint, NoSuchObject

log = logging.getLogger("modelzoo_trainer.stores")

SET_ASIDE: Final = "set_aside"
IS_PART: Final = re.compile(rf"[0-9a-f]{{{NUM_DIGITS}}}/[^/]+")
"""The name of a file of an attempt to upload a checkpoint, within that checkpoint."""
_RUN_LOCK: Final = ".lock"  # of the folder, by the process that trains in it
_NUM_THREADS: Final = 8
_MAX_BYTES: Final = 1 << 26  # of a file that is downloaded although it may not be needed


def pull(
    mirror: Mirror,
    *,
    owns: bool,
    with_files: bool = False,
    entries: list[StoredObject] | None = None,
) -> None:
    """Bring the folder up to date with the store.

    Each checkpoint of the store becomes a folder with only its manifest, unless it is here. What
    is here and not there is kept and will be uploaded, unless another machine has continued the
    run in the meantime: then it is set aside, with a warning.

    Args:
        mirror: The mirror.
        owns: Whether this process is the one that uploads; else only checkpoints are brought up to
            date, and complete ones are kept.
        with_files: Whether to download metrics and logs even if `owns` is false, unless a run of
            this machine is writing them here.
        entries: The objects of the store, if they have just been listed.

    Raises:
        StoreError: If the store cannot be read.
        OSError: If the folder cannot be written.
    """
    listing = Listing.of(mirror.store.list("") if entries is None else entries)
    record = MirrorRecord.read(mirror.folder)
    is_busy = not owns and _is_in_use(mirror)
    gone = {(one.name, one.attempt) for one in deletions(mirror.folder)}
    was_filled = bool(record.checkpoints)
    news = _pull_checkpoints(mirror, listing, record, gone, owns=owns)
    is_emptied = was_filled and not listing.checkpoints
    for name in checkpoints_in(mirror):
        if name not in listing.checkpoints and not is_busy:
            is_lost = lacks_files(mirror.path / name) and not _is_rest_there(mirror, name, listing)
            if is_lost:
                shutil.rmtree(mirror.path / name, ignore_errors=True)  # deleted elsewhere
            elif owns and not is_emptied:  # a store that lost everything is filled again
                _keep_or_set_aside(mirror, name, record, news)
    if owns or (with_files and not is_busy):
        kept = listing.checkpoints
        record.checkpoints = {k: v for k, v in record.checkpoints.items() if k in kept}
        _pull_files(mirror, listing, record)
        record.write()


def _is_rest_there(mirror: Mirror, name: str, listing: Listing) -> bool:
    """Return whether a checkpoint was saved here, and its missing files uploaded by other hosts."""
    path = mirror.path / name
    try:
        attempt = declared_attempt(read_bytes(path / MANIFEST))
        files = files_of(path)
    except (OSError, ValueError):
        return False
    if attempt is None or not any((path / file).exists() for file in files):
        return False
    there = {part.name: part.size_bytes for part in listing.parts.get(name, ())}
    return all(
        (path / file).exists() or there.get(f"{name}/{attempt}/{file}") == record["size_bytes"]
        for file, record in files.items()
    )


def _keep_or_set_aside(mirror: Mirror, name: str, record: MirrorRecord, news: list[str]) -> None:
    """Keep a checkpoint that the listing of the store lacks, set it aside, or remove it."""
    was_there = name in record.checkpoints
    if was_there and _manifest(mirror, name) is not None:
        return  # a listing that lags
    if was_there and news:
        shutil.rmtree(mirror.path / name, ignore_errors=True)  # by the machine that went on
    elif was_there:
        _set_aside(mirror, name, "was deleted from the store")
    elif news:
        why = f"was never uploaded, and another machine has continued the run ({news[-1]})"
        _set_aside(mirror, name, why)


def _is_in_use(mirror: Mirror) -> bool:
    """Return whether a run of this machine holds the lock of the local folder."""
    import fcntl

    try:
        fd = os.open(mirror.path / _RUN_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _pull_checkpoints(
    mirror: Mirror,
    listing: Listing,
    record: MirrorRecord,
    gone: set[tuple[str, str]],
    *,
    owns: bool,
) -> list[str]:
    """Make a folder for each checkpoint of the store; return those that were not known here.

    `gone`: names and attempts of those that were deleted here.
    """
    names = sorted(listing.checkpoints)
    news = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        texts = pool.map(lambda name: _manifest(mirror, name), names)
        for name, text in zip(names, texts, strict=True):
            if text is None:  # deleted in the meantime
                listing.checkpoints.discard(name)
                continue
            if (name, attempt_of(text)) in gone:
                record.checkpoints[name] = attempt_of(text)
                continue
            if record.checkpoints.get(name) != attempt_of(text):
                if not _is_here(mirror, name, text):
                    news.append(name)
                record.checkpoints[name] = attempt_of(text)
            make_stub(mirror, name, text, owns=owns, written=listing.written.get(name))
    return news


def _manifest(mirror: Mirror, name: str) -> bytes | None:
    try:
        return mirror.store.read(f"{name}/{MANIFEST}")[0]
    except NoSuchObject:
        return None


def _is_here(mirror: Mirror, name: str, text: bytes) -> bool:
    try:
        return read_bytes(mirror.path / name / MANIFEST) == text
    except OSError:
        return False


def make_stub(
    mirror: Mirror, name: str, text: bytes, *, owns: bool, written: float | None = None
) -> None:
    """Make the folder of a checkpoint that is only in the store, atomically."""
    path = mirror.path / name
    if _is_here(mirror, name, text):
        return
    if os.path.lexists(path):
        if lacks_files(path):
            shutil.rmtree(path, ignore_errors=True)
        elif not owns:
            return  # of a run of this machine
        else:
            _set_aside(mirror, name, "was never uploaded; the store has another of this name")
    fresh = mirror.folder / f"stub-{secrets.token_hex(8)}"
    fresh.mkdir()
    write_atomically(fresh / MANIFEST, text)
    if written is not None:
        os.utime(fresh / MANIFEST, (written, written))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fresh.rename(path)
    except OSError:  # another process was faster
        shutil.rmtree(fresh, ignore_errors=True)
        if not _is_here(mirror, name, text):
            raise


def lacks_files(path: Path) -> bool:
    """Return whether files of a checkpoint are missing, so that it is (or was) in the store."""
    try:
        return any(not (path / name).exists() for name in files_of(path))
    except (OSError, ValueError):  # no checkpoint of ours
        return False


def is_only_in_store(path: Path) -> bool:
    """Return whether files of a checkpoint are only in the object store of its folder."""
    return is_in_mirror(path) and lacks_files(path)


def _set_aside(mirror: Mirror, name: str, why: str) -> None:
    """Move what the store does not have out of the way of what it has."""
    stamp = f"{time.strftime('%Y%m%d_%H%M%S')}-{secrets.token_hex(2)}"
    place = mirror.folder / SET_ASIDE / stamp / name
    place.parent.mkdir(parents=True)
    (mirror.path / name).rename(place)
    log.warning(
        "%s %s. It was moved to %s and is not used; delete it there if you do not need it.",
        mirror.path / name,
        why,
        place,
    )


def _pull_files(mirror: Mirror, listing: Listing, record: MirrorRecord) -> None:
    """Download metrics, logs and other files that are missing here or were changed elsewhere."""
    wanted = {
        name: entry
        for name, entry in listing.files.items()
        if entry.size_bytes <= _MAX_BYTES and not _is_current(mirror, name, entry, record)
    }
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(
            lambda name: _pull_file(mirror, name, wanted[name], record.files.get(name)), wanted
        )
        for name, sent in zip(wanted, found, strict=True):
            if sent is not None:
                record.files[name] = sent


def _is_current(mirror: Mirror, name: str, entry: StoredObject, record: MirrorRecord) -> bool:
    """Return whether the store has not changed a file since it was downloaded."""
    sent = record.files.get(name)
    is_known = sent is not None and sent.modified == entry.modified
    return is_known and os.path.lexists(mirror.path / name)


def _pull_file(
    mirror: Mirror, name: str, entry: StoredObject, sent: SentFile | None
) -> SentFile | None:
    """Download a file, unless the store has what was uploaded from here."""
    path = mirror.path / name
    try:
        data, _ = mirror.store.read(name)
    except NoSuchObject:
        return None
    digest = xxhash.xxh3_128_hexdigest(data)
    if sent is not None and sent.xxh3_128 == digest and path.is_file():
        return replace(sent, modified=entry.modified)
    if path.is_symlink() or path.is_dir():
        return None
    own = read_bytes(path) if path.is_file() else data
    if own != data and (sent is None or xxhash.xxh3_128_hexdigest(own) != sent.xxh3_128):
        _set_aside(mirror, name, "differs from the store's file, which is used")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return SentFile(len(data), path.stat().st_mtime_ns, digest, entry.modified)


def fetch(mirror: Mirror, name: str) -> Path:
    """Return the path of one checkpoint or of weights, brought here from the store.

    Of a checkpoint only the manifest; its files are downloaded when they are needed.

    Raises:
        NoCheckpoint: If there is nothing of that name.
        StoreError: If the store cannot be read.
    """
    text = _manifest(mirror, name)
    if text is not None:
        make_stub(mirror, name, text, owns=False)
        return mirror.path / name
    entries = [one for one in mirror.store.list(name) if is_safe(one.name)]
    if not entries:
        entries = _file_of_weights(mirror, name)
    elif any(ATTEMPT.fullmatch(one.name) for one in entries):
        raise NoCheckpoint(
            f"{mirror.url_of(name)} is not a complete checkpoint: it has no {MANIFEST}. It is "
            f"being uploaded, or that was interrupted. Use another checkpoint."
        )
    if not entries:
        raise NoCheckpoint(f"{mirror.url_of(name)} does not exist.")
    for entry in entries:
        target = mirror.path / entry.name
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = mirror.folder / f"download-{secrets.token_hex(8)}"
        mirror.store.download(entry.name, fresh, entry.size_bytes, None)
        fresh.replace(target)
    return mirror.path / name


def _file_of_weights(mirror: Mirror, name: str) -> list[StoredObject]:
    """Return a file of weights, with the files of its folder that it may need."""
    folder, _, file = name.rpartition("/")
    beside = [one for one in mirror.store.list(folder) if one.name.rpartition("/")[0] == folder]
    if all(one.name != name for one in beside):
        return []
    if file.endswith(".index.json"):
        return [one for one in beside if is_safe(one.name)]
    return [one for one in beside if one.name == name or one.name.endswith("config.json")]
