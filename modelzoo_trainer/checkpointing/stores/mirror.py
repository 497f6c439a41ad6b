"""A local folder that mirrors a prefix of an object store.

All code of the trainer sees the folder. It is bound to its store by a file in a hidden folder, so
that functions that get only the path of a checkpoint find the store.

A checkpoint in the store has the files of the local one, byte for byte, under names such as

    checkpoint_100/6c9f1f0a5b7d2e34/state.json  one attempt to upload it: a digest of its manifest,
                                                or what the manifest says, see `apart`
    checkpoint_100/manifest.json                created last, and only if there is none

so that it is complete there, or does not exist. Locally, a checkpoint that is in the store may lack
any file but its manifest; `reading.complete` downloads them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.checkpointing.stores.record import write_atomically
from modelzoo_trainer.checkpointing.stores.store import Store, open_store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl, is_url, parse_url
from modelzoo_trainer.errors import ConfigError, folder_reason, reason_of

MANIFEST: Final = "manifest.json"
FOLDER: Final = ".store"  # hidden: neither uploaded nor listed
SENT_HIDDEN: Final = frozenset({".finished.json"})  # hidden, but part of a run
_BINDING: Final = "binding.json"
_CACHE: Final = Path("~/.cache/modelzoo_trainer/stores")
NUM_DIGITS: Final = 16

ATTEMPT: Final = re.compile(rf"(?P<name>.+)/(?P<attempt>[0-9a-f]{{{NUM_DIGITS}}})/[^/]+")
"""The name of a file of an attempt to upload a checkpoint."""

_HEX: Final = re.compile(rf"[0-9a-f]{{{NUM_DIGITS}}}")

_OPEN: Final[dict[str, Mirror]] = {}
_LOCK: Final = threading.Lock()


class Mirror:
    """A local folder and the store whose prefix it mirrors."""

    def __init__(self, path: Path, url: StoreUrl, options: Mapping[str, Any]) -> None:
        self.path = path
        self.url = url
        self.options = dict(options)
        self.is_split = False
        """Whether processes of this run have different folders for this prefix."""
        self.is_apart = False
        """Whether this process does not see the folder of the process that uploads."""
        self._store: Store | None = None
        self._lock = threading.Lock()

    @property
    def store(self) -> Store:
        """The store, opened when it is first used.

        Raises:
            StoreError: If the package is missing, or the options are invalid.
        """
        with self._lock:
            if self._store is None:
                self._store = open_store(self.url, self.options)
            return self._store

    @property
    def folder(self) -> Path:
        """The hidden folder with what the mirror knows of its store."""
        return self.path / FOLDER

    def url_of(self, name: str) -> str:
        """Return the URL of a name, for messages."""
        return str(self.url / name if name else self.url)

    def name_of(self, path: Path) -> str | None:
        """Return the name in the store of a path in the mirror; None = it has none there."""
        try:
            inside = Path(os.path.realpath(path.parent), path.name).relative_to(self.path)
        except ValueError:
            return None
        if any(part.startswith(".") for part in inside.parts):
            return None
        return inside.as_posix() if inside.parts else ""


def checkpoints_in(mirror: Mirror) -> list[str]:
    """Return the names of the checkpoints in the folder, complete or not."""
    return [name for name, _, files in _walk(mirror.path, "") if MANIFEST in files]


def plain_files_in(mirror: Mirror) -> Iterator[str]:
    """Yield the names of all files that are not of a checkpoint, without hidden ones and links."""
    for name, _, files in _walk(mirror.path, ""):
        if MANIFEST not in files:
            yield from (f"{name}/{file}" if name else file for file in files)


def _walk(folder: Path, name: str) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield the name, path and files of a folder and those in it, hidden ones excluded."""
    files: list[str] = []
    folders: list[str] = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # deleted in the meantime
        return
    for entry in entries:
        if entry.is_symlink() or (entry.name.startswith(".") and entry.name not in SENT_HIDDEN):
            continue
        (folders if entry.is_dir() else files).append(entry.name)
    yield name, folder, files
    if MANIFEST not in files:
        for inner in folders:
            yield from _walk(folder / inner, f"{name}/{inner}" if name else inner)


def declared_attempt(manifest: bytes) -> str | None:
    """Return the attempt under which files were uploaded before the manifest was written.

    None = there were none: all files are where the manifest was written.
    """
    try:
        found = json.loads(manifest).get("attempt")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) and _HEX.fullmatch(found) else None


def attempt_of(manifest: bytes) -> str:
    """Return the name of the attempt to upload the checkpoint that has this manifest."""
    return declared_attempt(manifest) or hashlib.sha256(manifest).hexdigest()[:NUM_DIGITS]


def files_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the size and digest of each file that a manifest lists.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a manifest.
    """
    try:
        files = json.loads(read_bytes(path / MANIFEST))["files"]
        return {
            str(name): {"size_bytes": int(one["size_bytes"]), "xxh3_128": str(one["xxh3_128"])}
            for name, one in files.items()
            if "/" not in name
        }
    except (LookupError, TypeError, AttributeError) as error:
        why = reason_of(error)
        raise ValueError(f"{str(path / MANIFEST)!r} is not a manifest ({why})") from None


def open_mirror(
    url: StoreUrl,
    *,
    cache_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Mirror:
    """Return the mirror of a URL; create its folder. Does not use the network.

    Args:
        url: Of a prefix, such as `s3://bucket/runs/a`.
        cache_dir: The folder of all mirrors; None = `~/.cache/modelzoo_trainer/stores`.
        options: Of the store, such as `endpoint`.

    Raises:
        ConfigError: If the folder cannot be created.
    """
    given = dict(options or {})
    root = Path(os.path.realpath(Path(_CACHE if cache_dir is None else cache_dir).expanduser()))
    path = root / _folder_name(url, given)
    with _LOCK:
        known = _OPEN.get(str(path))
        if known is not None and known.options == given and path.is_dir():
            return known
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            (path / FOLDER).mkdir(exist_ok=True)
            binding = json.dumps({"url": str(url), "options": given}).encode()
            write_atomically(path / FOLDER / _BINDING, binding)
        except OSError as error:
            raise ConfigError(
                f"The local copy of '{url}' cannot be kept in {str(path)!r}: "
                f"{folder_reason(path, error)}. Set trainer.init.object_store.cache_dir to a "
                f"writable folder."
            ) from None
        made = _OPEN[str(path)] = Mirror(path, url, given)
        return made


def _folder_name(url: StoreUrl, options: Mapping[str, Any]) -> str:
    """Return a readable name for the mirror of a URL, different for each URL and server."""
    server = json.dumps([str(url), options.get("endpoint")])
    digest = hashlib.sha256(server.encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{url.bucket}/{url.prefix}").strip("-.")
    return f"{readable[-100:]}-{digest}"


def mirror_of(path: str | Path) -> Mirror | None:
    """Return the mirror that a path is in, or None."""
    inside = Path(os.path.abspath(path))
    for folder in (inside, *inside.parents):
        if folder.name.startswith("."):
            continue  # a hidden folder may be above a mirror
        binding = folder / FOLDER / _BINDING
        if not os.path.isfile(binding):  # as False where the name is too long
            continue
        real = Path(os.path.realpath(folder))
        with _LOCK:
            known = _OPEN.get(str(real))
            if known is None:
                known = _OPEN[str(real)] = _bound(real, binding)
        return known
    return None


def located(path: str | Path) -> tuple[Mirror | None, str]:
    """Return the mirror that a path is in, None if it has no name in a store, and that name."""
    mirror = mirror_of(path)
    name = None if mirror is None else mirror.name_of(Path(path))
    return (None, "") if name is None else (mirror, name)


def _bound(path: Path, binding: Path) -> Mirror:
    try:
        raw = json.loads(read_bytes(binding))
        url = parse_url(str(raw["url"]))
        if not isinstance(url, StoreUrl):
            raise ValueError(f"{raw['url']!r} is a folder, not an object store")
        return Mirror(path, url, dict(raw["options"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = reason_of(error)
        raise ConfigError(
            f"{str(binding)!r} cannot be read ({why}). It names the object store of this folder; "
            f"pass the URL of the store instead of the folder."
        ) from None


def resolve(
    given: Any,
    setting: str,
    *,
    cache_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the local folder of a URL; anything else unchanged. Does not use the network.

    `setting`: its name, for messages.

    Raises:
        ConfigError: If the URL is invalid, or the folder cannot be created.
    """
    if not isinstance(given, (str, Path)) or not is_url(given):
        return given
    url = parse_url(given, setting)
    if isinstance(url, Path):  # file://
        return url
    return open_mirror(url, cache_dir=cache_dir, options=options).path
