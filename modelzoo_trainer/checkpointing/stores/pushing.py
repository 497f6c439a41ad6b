"""One round of uploads: deletions, then checkpoints, then metrics and logs."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from modelzoo_trainer.base.regular_files import open_regular, read_bytes
from modelzoo_trainer.checkpointing.stores.listing import Listing
from modelzoo_trainer.checkpointing.stores.mirror import (
    MANIFEST,
    Mirror,
    attempt_of,
    checkpoints_in,
    declared_attempt,
    files_of,
    plain_files_in,
)
from modelzoo_trainer.checkpointing.stores.record import Deletion, MirrorRecord, SentFile, deletions
from modelzoo_trainer.errors import DamagedObject, NoSuchObject, StoreError

log = logging.getLogger("modelzoo_trainer.stores")

_NUM_FILES: Final = 2  # of a checkpoint at a time; each is sent in parallel parts
_NUM_DELETIONS: Final = 3
_PIECE: Final = 1 << 22
_OLD_S: Final = 3600.0  # longer than a lease: of an upload that has ended
_SHARE: Final = 0.1  # of the time that one file of metrics may take to upload


@dataclass(slots=True)
class Progress:
    """What is uploaded, for messages; read by other threads."""

    name: str = ""
    num_bytes: int = 0
    num_sent: int = 0
    moves: int = 0  # changes with every piece


@dataclass(slots=True)
class Pending:
    """What is only in the mirror."""

    checkpoints: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.files)


class Pusher:
    """Uploads what is new in a mirror; used by one thread at a time.

    Args:
        mirror: The mirror.
        check: Called before the store is changed; raises a `ConfigError` if this run may no longer
            change it.
    """

    def __init__(self, mirror: Mirror, check: Callable[[], None]) -> None:
        self.mirror = mirror
        self.record = MirrorRecord.read(mirror.folder)
        self.progress = Progress()
        self._check = check
        self._sent: set[str] = set()  # objects of attempts, by this process
        self._refused: dict[str, str] = {}  # checkpoints that cannot be uploaded, and why
        self._seen: set[str] = set()
        self._unreadable: set[str] = set()
        self._next_s: dict[str, float] = {}

    # ---- what is to be done

    def pending(self, *, all_files: bool = True) -> Pending:
        """Return what is not in the store, the newest checkpoint first.

        `all_files`: also those that were uploaded a short time ago.
        """
        names = [name for name in checkpoints_in(self.mirror) if self._is_new(name)]
        names.sort(key=lambda name: _written(self.mirror.path / name), reverse=True)
        now = time.monotonic()
        files = [
            name
            for name in sorted(plain_files_in(self.mirror), key=_order)
            if name not in self._unreadable
            and self._is_changed(name)
            and (all_files or self._next_s.get(name, 0.0) <= now)
        ]
        return Pending(names, files)

    @property
    def refused(self) -> dict[str, str]:
        """The checkpoints that will not be uploaded, and why."""
        there = set(checkpoints_in(self.mirror))
        return {name: why for name, why in self._refused.items() if name in there}

    def _is_new(self, name: str) -> bool:
        path = self.mirror.path / name
        try:
            text = read_bytes(path / MANIFEST)
            if self.record.checkpoints.get(name) == attempt_of(text) or name in self._refused:
                return False
            there = [(path / file).exists() for file in files_of(path)]
            # Other hosts may have uploaded the rest.
            return all(there) or (any(there) and declared_attempt(text) is not None)
        except (OSError, ValueError):
            return False

    def _is_changed(self, name: str) -> bool:
        try:
            status = (self.mirror.path / name).stat()
        except OSError:
            return False
        sent = self.record.files.get(name)
        return sent is None or (sent.size_bytes, sent.mtime_ns) != (
            status.st_size,
            status.st_mtime_ns,
        )

    # ---- a round

    def push(self, *, all_files: bool = True) -> None:
        """Upload what is new, and repeat deletions.

        Raises:
            StoreError: If the store refuses something, or does not answer; the rest has been tried
                unless it does not answer.
            OSError: If the mirror cannot be read or written.
        """
        errors: list[StoreError] = []
        tried: set[str] = set()
        while (name := self._next(tried)) is not None and not errors:
            tried.add(name)
            self._try(errors, partial(self._push_checkpoint, name))
        self._try(errors, partial(self._push_files, all_files=all_files))
        self._repeat_deletions(errors)
        self._delete_files(errors)
        self.record.write()
        if errors:
            raise errors[0]

    def push_one(self, name: str) -> str | None:
        """Upload a checkpoint, unless it is in the store; return why it cannot be, or None.

        Raises:
            StoreError: If the store refuses something, or does not answer.
            OSError: If the mirror cannot be read or written.
        """
        if self._is_new(name):
            self._push_checkpoint(name)
        return self._refused.get(name)

    def push_deletions(self) -> None:
        """Delete in the store what was deleted here, and nothing else.

        Raises:
            StoreError: If the store refuses one, or does not answer.
        """
        errors: list[StoreError] = []
        self._repeat_deletions(errors, is_asked=True)
        if errors:
            raise errors[0]

    def _repeat_deletions(self, errors: list[StoreError], *, is_asked: bool = False) -> None:
        """Delete what was deleted here, once a newer one of its kind is in the store.

        A store that is slower than checkpoints are written and deleted would never have any.
        `is_asked`: by a user, so at once.
        """
        gone = deletions(self.mirror.folder)
        here = set(checkpoints_in(self.mirror))
        attempts = {(one.name, one.attempt) for one in gone}
        kept = [it for it in self.record.checkpoints.items() if it not in attempts]
        there = {_kind(name) for name, _ in kept if name in here}
        waiting = {_kind(name) for name in [*self.pending().checkpoints, *self.refused]}
        for one in gone:
            kind = _kind(one.name)
            if is_asked or kind in there or kind not in waiting:
                self._try(errors, partial(self._delete, one))

    def sweep(self) -> None:
        """Delete what interrupted uploads have left, if it is old by the clock of the store.

        Raises:
            StoreError: If the store cannot be read, or refuses that.
        """
        entries = self.mirror.store.list("")
        parts = Listing.of(entries).parts
        now = max((entry.modified for entry in entries), default=0.0)
        # The record may lack a checkpoint that a listing has lacked.
        kept = {name: f"{name}/{self._attempt_there(name)}/" for name in parts}
        old = [
            entry.name
            for name, found in parts.items()
            for entry in found
            if not entry.name.startswith(f"{name}/{self.record.checkpoints.get(name)}/")
            and not entry.name.startswith(kept[name])
            and entry.modified < now - _OLD_S
        ]
        if old:
            self._check()
            self.mirror.store.delete(old)
            log.info("Deleted %d files of interrupted uploads to %s.", len(old), self.mirror.url)

    def _attempt_there(self, name: str) -> str | None:
        """Return the attempt that a checkpoint in the store consists of."""
        try:
            return attempt_of(self.mirror.store.read(f"{name}/{MANIFEST}")[0])
        except NoSuchObject:
            return None

    def _next(self, tried: set[str]) -> str | None:
        """Return the newest checkpoint to upload in this round."""
        names = self.pending().checkpoints
        return next((name for name in names if name not in tried), None)

    def _try(self, errors: list[StoreError], act: Callable[[], None]) -> None:
        if errors and errors[-1].is_temporary:
            return
        try:
            act()
        except StoreError as error:
            errors.append(error)

    def _delete(self, gone: Deletion) -> None:
        """Delete a checkpoint: first its manifest, so that it never seems complete."""
        self._check()
        store, name = self.mirror.store, gone.name
        for _ in range(_NUM_DELETIONS):  # a request may be damaged on its way
            if self._attempt_there(name) != gone.attempt:
                break
            store.delete([f"{name}/{MANIFEST}"])
        for _ in range(_NUM_DELETIONS):
            names = [one.name for one in store.list(f"{name}/{gone.attempt}")]
            if not names:
                break
            store.delete(names)
        if self.record.checkpoints.get(name) == gone.attempt:
            del self.record.checkpoints[name]
            self.record.write()
        self._sent = {one for one in self._sent if not one.startswith(f"{name}/{gone.attempt}/")}
        gone.note.unlink(missing_ok=True)
        self.progress.moves += 1
        log.debug("Deleted %s.", self.mirror.url_of(name))

    def _push_checkpoint(self, name: str) -> None:
        """Upload a checkpoint as it is now, even if it is deleted here meanwhile."""
        begin = time.perf_counter()
        try:
            with _links(self.mirror, name) as path:
                text = read_bytes(path / MANIFEST)
                attempt = attempt_of(text)
                num_bytes = self._send_all(path, f"{name}/{attempt}")
                if declared_attempt(text):
                    self._check_complete(path, f"{name}/{attempt}")
        except DamagedObject as error:
            self._refuse(name, str(error))
            return
        except StoreError:
            raise
        except FileNotFoundError:  # deleted before it began
            return
        finally:
            self.progress.name = ""
        self._push_files()  # a resumed run continues the metrics of its checkpoint
        for gone in deletions(self.mirror.folder):
            if gone.name == name and gone.attempt != attempt:  # an earlier one of this name
                self._delete(gone)
        self._check()
        if not self.mirror.store.create(f"{name}/{MANIFEST}", text):
            self._refuse(name, "the store has another checkpoint of this name")
            return
        self.record.checkpoints[name] = attempt
        self.record.write()
        self.progress.moves += 1
        log.info(
            "Uploaded %s (%.1f MB, %.1f s).",
            self.mirror.url_of(name),
            num_bytes / 1e6,
            time.perf_counter() - begin,
        )

    def _send_all(self, path: Path, target: str) -> int:
        """Upload the files of a checkpoint and return their size."""
        files = files_of(path)
        progress = self.progress
        progress.name, progress.num_sent = path.name, 0
        progress.num_bytes = sum(record["size_bytes"] for record in files.values())
        with ThreadPoolExecutor(_NUM_FILES, thread_name_prefix="upload") as pool:
            jobs = [
                pool.submit(self._send, f"{target}/{file}", path / file, record)
                for file, record in sorted(files.items())
                if (path / file).exists()
            ]
            for job in jobs:
                job.result()
        return progress.num_bytes

    def _check_complete(self, path: Path, target: str) -> None:
        """Raise an error unless the store has all files of a checkpoint, in their size."""
        there = {one.name: one.size_bytes for one in self.mirror.store.list(target)}
        files = files_of(path)
        missing = [
            file
            for file, record in sorted(files.items())
            if there.get(f"{target}/{file}") != record["size_bytes"]
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise DamagedObject(
                f"{missing[0]}{more} of its {len(files)} files, of another host, not in the store"
            )

    def _push_files(self, *, all_files: bool = True) -> None:
        for name in self.pending(all_files=all_files).files:
            self._push_file(name)

    def _send(self, name: str, file: Path, record: dict[str, Any]) -> None:
        """Upload a file of a checkpoint, unless this process has done so."""
        size: int = record["size_bytes"]
        if name not in self._sent:
            if size <= _PIECE:
                self.mirror.store.put(name, file, xxh3_128=record["xxh3_128"])
            else:
                self.mirror.store.put(
                    name,
                    lambda: self._counted(_pieces(file, size + 1)),
                    size_bytes=size,
                    xxh3_128=record["xxh3_128"],
                )
            self._sent.add(name)
        if size <= _PIECE:
            self.progress.num_sent += size
        self.progress.moves += 1

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self.progress.num_sent += len(piece)
            self.progress.moves += 1

    def _refuse(self, name: str, why: str) -> None:
        self._refused[name] = why
        log.error(
            "%s cannot be uploaded to %s: %s. It stays in the local copy only.",
            self.mirror.path / name,
            self.mirror.url,
            why,
        )

    def _push_file(self, name: str) -> None:
        """Upload a file of metrics, a log, or the like, as long as it is now."""
        path, begin = self.mirror.path / name, time.monotonic()
        try:
            status = path.stat()
            digest = xxhash.xxh3_128()

            def pieces() -> Iterator[bytes]:
                digest.reset()
                for piece in _pieces(path, status.st_size):
                    digest.update(piece)
                    yield piece

            if status.st_size <= _PIECE:
                data = b"".join(pieces())
                self.mirror.store.put(name, data)
            else:
                self.mirror.store.put(name, pieces, size_bytes=status.st_size)
        except StoreError:
            raise
        except FileNotFoundError:  # deleted in the meantime
            return
        except OSError as error:
            if name not in self._unreadable:
                log.warning("%s cannot be uploaded: %s.", path, error.strerror or error)
            self._unreadable.add(name)
            return
        sent = SentFile(status.st_size, status.st_mtime_ns, digest.hexdigest())
        self.record.files[name] = sent
        self._seen.add(name)
        self.progress.moves += 1
        now = time.monotonic()
        self._next_s[name] = now + (now - begin) / _SHARE

    def _delete_files(self, errors: list[StoreError]) -> None:
        """Delete files that this process has uploaded and that were deleted here since then."""
        gone = [name for name in self._seen if not (self.mirror.path / name).exists()]
        if gone and not errors:
            self._try(errors, partial(self.mirror.store.delete, gone))
        if not errors:
            for name in gone:
                self._seen.discard(name)
                self.record.files.pop(name, None)


@contextmanager
def _links(mirror: Mirror, name: str) -> Iterator[Path]:
    """Yield a folder with links to the files of a checkpoint, which stay if it is deleted.

    On a disk without hard links, the checkpoint itself.

    Raises:
        FileNotFoundError: If it is no longer there.
    """
    path, folder = mirror.path / name, mirror.folder / f"upload-{secrets.token_hex(8)}"
    place = folder / path.name
    place.mkdir(parents=True)
    try:
        try:
            for entry in list(path.iterdir()):
                os.link(entry, place / entry.name, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            place = path
        yield place
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _order(name: str) -> tuple[str, bool, str]:
    """Sort key that puts what refers to other files of a folder, such as config.json, last."""
    folder, _, file = name.rpartition("/")
    return folder, file.endswith(("config.json", ".index.json")), file


def _kind(name: str) -> str:
    """Return what checkpoints that are written and deleted together have in common."""
    return re.sub(r"\d+", "", name)


def _written(path: Path) -> int:
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _pieces(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a file that may be growing."""
    with open_regular(path) as file:
        while num_bytes > 0 and (piece := file.read(min(_PIECE, num_bytes))):
            num_bytes -= len(piece)
            yield piece
