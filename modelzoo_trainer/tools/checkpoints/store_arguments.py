"""URLs of object stores as arguments of commands, and the command `upload`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.checkpointing.folder import LATEST, list_checkpoints
from modelzoo_trainer.checkpointing.stores.lease import open_lease
from modelzoo_trainer.checkpointing.stores.mirror import MANIFEST, Mirror, mirror_of, open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import IS_PART, fetch, pull
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.record import deletions
from modelzoo_trainer.checkpointing.stores.uploader import Uploader
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl, is_url, parse_url
from modelzoo_trainer.errors import CheckpointError, ConfigError, NoCheckpoint, StoreError

_NAMES: Final = ("path", "paths", "before", "after", "source")
_PATIENCE_S: Final = 300.0


def bring_here(options: argparse.Namespace) -> None:
    """Replace URLs in the options of a command by local paths.

    Checkpoints become folders with only their manifest; what a command reads is downloaded then.

    Raises:
        ConfigError: If a URL is invalid, or the store cannot be used.
        NoCheckpoint: If there is nothing at a URL.
        StoreError: If the store cannot be read.
    """
    siblings = getattr(options, "needs_siblings", False)
    for name in _NAMES:
        given = getattr(options, name, None)
        if isinstance(given, list):
            setattr(options, name, [local_path(one, siblings=siblings) for one in given])
        elif given is not None:
            found = local_path(given)
            setattr(options, name, str(found) if name == "source" and found != given else found)


def local_path(given: Any, *, siblings: bool = False) -> Any:
    """Return the local path of the checkpoint, weights or folder at a URL; others unchanged.

    `siblings`: whether the other checkpoints of its folder, and metrics and logs, are brought
    here, too.

    Raises:
        ConfigError: If the URL is invalid.
        NoCheckpoint: If there is nothing.
        StoreError: If the store cannot be read.
    """
    if not isinstance(given, str) or not is_url(given):
        return given
    url = parse_url(given)
    if isinstance(url, Path):
        return url
    parent, _, name = url.prefix.rpartition("/")
    if name == LATEST:
        return _newest(open_mirror(StoreUrl(url.scheme, url.bucket, parent)))
    mirror = open_mirror(url)
    entries = mirror.store.list("")
    is_one = any(IS_PART.fullmatch(one.name) or one.name == MANIFEST for one in entries)
    if name and (is_one or not entries):  # a checkpoint, or a file
        folder = open_mirror(StoreUrl(url.scheme, url.bucket, parent))
        if siblings:
            pull(folder, owns=False, with_files=True)
        return fetch(folder, name)
    if not entries:
        raise NoCheckpoint(f"{url} is empty.")
    pull(mirror, owns=False, with_files=siblings, entries=entries)
    return mirror.path


def _newest(mirror: Mirror) -> Path:
    pull(mirror, owns=False)
    found = list_checkpoints(mirror.path)
    if not found:
        raise NoCheckpoint(f"{mirror.url} has no checkpoints.")
    return found[-1].path


def push_deletions(folder: Path) -> None:
    """Delete from the store what was deleted from its local copy; a no-op for other folders.

    Raises:
        CheckpointError: If the store refuses that, or does not answer.
    """
    mirror = mirror_of(folder)
    if mirror is None or not deletions(mirror.folder):
        return
    try:
        Pusher(mirror, lambda: None).push_deletions()
    except StoreError as error:
        raise CheckpointError(
            f"Deleted from the local copy {str(mirror.path)!r} only: {error}. The next run, or the "
            f"command upload, deletes it from {mirror.url}."
        ) from error


def upload(folder: Path) -> list[str]:
    """Upload everything that is only in a local copy, and return what to print.

    Raises:
        ConfigError: If the folder is not a local copy, or a run uses its store.
        CheckpointError: If something could not be uploaded.
        StoreError: If the store cannot be used.
    """
    mirror = mirror_of(folder)
    if mirror is None:
        raise ConfigError(
            f"{str(folder)!r} is not the local copy of an object store. Pass the folder that the "
            f"message of the run names."
        )
    mirror.store.probe()
    lease = open_lease(mirror.url, mirror.options)
    lease.take()
    try:
        uploader = Uploader(mirror, sync_s=_PATIENCE_S, cache_bytes=None, check=lease.check)
        names = uploader.pending.checkpoints
        try:
            rest = uploader.finish(_PATIENCE_S)
        finally:
            uploader.stop()
        if rest:
            raise CheckpointError(rest)
    finally:
        lease.release()
    return [f"{mirror.url_of(name)}: uploaded" for name in names] or [f"{mirror.url}: complete"]
