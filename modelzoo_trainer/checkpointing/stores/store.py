"""Read and write the objects of a prefix."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import xxhash

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.checkpointing.stores.client import (
    TimeLimits,
    import_obstore,
    is_plain,
    limits_of,
    open_client,
)
from modelzoo_trainer.checkpointing.stores.downloads import download_ranges
from modelzoo_trainer.checkpointing.stores.failures import RequestFailure, classify
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl, parse_url
from modelzoo_trainer.errors import (
    ConfigError,
    DamagedObject,
    NoSuchObject,
    ObjectChanged,
    StoreError,
)

PART_BYTES: Final = 8 << 20
"""Size of the parts of an upload; larger if there were more than `_MAX_PARTS`."""
_MAX_PARTS: Final = 9000  # S3 allows 10,000
_CONCURRENT_PARTS: Final = 8
_DOWNLOADS: Final = 3
_PROBE_S: Final = 20
_PROBES: Final = ".probe"
_OLD_PROBE_S: Final = 3600
_T = TypeVar("_T")


class Tag(NamedTuple):
    """Identifies the content of an object at one time."""

    e_tag: str | None
    version: str | None

    def condition(self) -> dict[str, str]:
        """Return the condition of a write that replaces this content."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class StoredObject(NamedTuple):
    """An object in a listing; `modified`: seconds since 1970 by the clock of the store."""

    name: str
    size_bytes: int
    modified: float


def open_store(url: str | StoreUrl, options: Mapping[str, Any] | None = None) -> Store:
    """Open the store of a URL; makes no request.

    Args:
        url: `s3://`, `gs://`, `az://` or `memory://`.
        options: Settings of obstore's store and client, such as endpoint and region;
            `request_seconds` limits one request, `retry_seconds` the attempts after a failure.

    Raises:
        ConfigError: If the URL or an option is invalid, or obstore is not installed.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    if isinstance(parsed, Path):
        raise ConfigError(f"{url} is a folder, not an object store. Use its path.")
    api = import_obstore(parsed)
    limits = limits_of(options or {})
    client = open_client(api, parsed, options or {}, limits)
    return Store(parsed, client, api, limits, is_plain=is_plain(options or {}))


class Store:
    """The objects of a prefix. Used by several threads at a time.

    Every method retries after errors that may pass, with back-off, and raises a `StoreError` in
    the end: `is_temporary` tells whether a later attempt may succeed. Credentials that are refused
    are tried three times, since a request that was damaged on the way is refused in the same way.

    Args:
        url: The prefix.
        client: Its store of obstore.
        api: The module obstore, or what replaces it in a test.
        limits: Time limits.
        is_plain: Whether answers may be damaged on the way, because they are not encrypted (http):
            what has no checksum is then read twice.
    """

    def __init__(
        self,
        url: StoreUrl,
        client: Any,
        api: ModuleType | Any,
        limits: TimeLimits,
        *,
        is_plain: bool = False,
    ) -> None:
        self.url = url
        self._is_plain = is_plain
        self._client = client
        self._api = api
        self._limits = limits

    def __repr__(self) -> str:
        return f"Store({str(self.url)!r})"

    def put(
        self,
        name: str,
        source: Path | bytes | Callable[[], Iterable[bytes]],
        *,
        size_bytes: int = 0,
        xxh3_128: str | None = None,
    ) -> None:
        """Write an object, replacing one of that name; it becomes visible when it is complete.

        Uses at most about 16 parts of memory. The store compares each part with its SHA256 (S3).

        Args:
            name: Its name.
            source: A file, bytes, or a function that returns all pieces again for each attempt.
            size_bytes: Expected size of these pieces, for the size of the parts.
            xxh3_128: Checksum of the content; nothing is visible if it differs.

        Raises:
            StoreError: If it cannot be written.
            DamagedObject: If the content does not match the checksum.
            OSError: If a file cannot be read.
        """
        self._run(f"upload {name}", lambda: self._put(name, source, size_bytes, xxh3_128))

    def _put(
        self,
        name: str,
        source: Path | bytes | Callable[[], Iterable[bytes]],
        size_bytes: int,
        xxh3_128: str | None,
    ) -> None:
        if isinstance(source, Path):
            try:
                size_bytes = source.stat().st_size
            except OSError as error:
                raise _OfSource(error) from None
        elif isinstance(source, bytes):
            size_bytes = len(source)
        part = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))
        pieces = _Pieces(_pieces(source, part), xxh3_128)
        try:
            if isinstance(source, (Path, bytes)) and size_bytes <= part:
                data: Any = b"".join(pieces)
            else:
                data = pieces
            self._api.put(
                self._client,
                self._path(name),
                data,
                chunk_size=part,
                max_concurrency=_CONCURRENT_PARTS,
            )
        except Exception:
            if pieces.error is not None:
                raise _OfSource(pieces.error) from None
            raise
        finally:
            pieces.close()

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object if there is none of that name, atomically.

        Returns:
            Whether the object has this content now; False if there is another one.
        """
        return self.create_tagged(name, data) is not None

    def create_tagged(self, name: str, data: bytes) -> Tag | None:
        """Do the same, and return what identifies the content; None if there is another one."""

        def create() -> Tag | None:
            try:
                return self._put_if(name, data, "create")
            except self._api.exceptions.AlreadyExistsError:
                # Perhaps ours, whose answer was lost.
                return self._read(name)[1] if self._holds(name, data) else None

        return self._run(f"create {name}", create)

    def replace(self, name: str, data: bytes, tag: Tag) -> Tag:
        """Replace the content that `tag` identifies, atomically.

        The content should never have been there before.

        Raises:
            ObjectChanged: If there is another content, or none.
        """

        def change() -> Tag:
            refused = (self._api.exceptions.PreconditionError, FileNotFoundError)
            try:
                return self._put_if(name, data, tag.condition())
            except refused as error:
                if not self._is_missing(error) and isinstance(error, FileNotFoundError):
                    raise  # there is no bucket
                if not self._holds(name, data):
                    raise ObjectChanged(
                        f"{self.url / name} was changed by another process"
                    ) from None
                return self._read(name)[1]

        return self._run(f"replace {name}", change)

    def _put_if(self, name: str, data: bytes, mode: Any) -> Tag:
        found = self._api.put(self._client, self._path(name), data, mode=mode)
        return Tag(found["e_tag"], found["version"])

    def _holds(self, name: str, data: bytes) -> bool:
        """Return whether an object has a content."""
        try:
            return self._read(name)[0] == data
        except FileNotFoundError as error:
            if not self._is_missing(error):
                raise
            return False

    def _is_missing(self, error: Exception) -> bool:
        """Return whether the object does not exist, but the bucket."""
        return classify(error, self.url).is_missing

    def read(self, name: str) -> tuple[bytes, Tag]:
        """Return the content of a small object and what identifies it.

        Raises:
            NoSuchObject: If there is none.
        """
        return self._run(f"read {name}", lambda: self._read(name))

    def _read(self, name: str) -> tuple[bytes, Tag]:
        """Read an object, again if the store has no checksum of it that proves what came."""
        data, tag = self._read_once(name)
        while not self._is_proven(data, tag):
            before = data
            data, tag = self._read_once(name)
            if data == before:
                break
        return data, tag

    def _read_once(self, name: str) -> tuple[bytes, Tag]:
        found = self._api.get(self._client, self._path(name))
        meta = found.meta
        data = bytes(found.bytes())
        if len(data) != meta["size"]:
            raise TimeoutError(f"{len(data)} of {meta['size']} bytes were received")
        return data, Tag(meta["e_tag"], meta["version"])

    def _is_proven(self, data: bytes, tag: Tag) -> bool:
        """Return whether data are certainly what the store has."""
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return not self._is_plain or (tag.e_tag or "").strip('"') == md5

    def download(self, name: str, file: Path, size_bytes: int, xxh3_128: str | None) -> None:
        """Write an object to a new file durably, in parallel ranges.

        A content that does not match is downloaded again. No file remains after an error.

        Args:
            name: Its name.
            file: Path of the file, which must not exist.
            size_bytes: Its size.
            xxh3_128: Its checksum; None = not compared.

        Raises:
            NoSuchObject: If there is none.
            DamagedObject: If the content does not match the size or checksum.
            StoreError: If it cannot be read.
            OSError: If the file cannot be written.
        """
        for _ in range(_DOWNLOADS):
            found = download_ranges(
                lambda begin, end: self._range(name, begin, end), file, size_bytes, xxh3_128
            )
            if found:
                return
        raise DamagedObject(
            f"{self.url / name} is damaged: {size_bytes:,} bytes do not match their checksum "
            f"(downloaded {_DOWNLOADS} times)"
        )

    def _range(self, name: str, begin: int, end: int) -> Any:
        def get() -> Any:
            try:
                data = self._api.get_range(self._client, self._path(name), start=begin, end=end)
                if len(data) == end - begin:
                    return data
            except (self._api.exceptions.BaseError, ValueError) as error:
                if not classify(error, self.url).is_short:
                    raise
            raise DamagedObject(f"{self.url / name} is damaged: it ends before byte {end:,}")

        return self._run(f"download {name}", get)

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return all objects below a folder, in order of their names."""

        def collect() -> list[StoredObject]:
            path = self._path(prefix) if prefix else self.url.prefix
            cut = len(self.url.prefix) + 1 if self.url.prefix else 0
            found = [
                StoredObject(one["path"][cut:], one["size"], one["last_modified"].timestamp())
                for chunk in self._api.list(self._client, path or None)
                for one in chunk
            ]
            return sorted(found)

        def collect_twice() -> list[StoredObject]:
            found = collect()
            while found != (found := collect()):  # a damaged answer, or something new
                pass
            return found

        if self._is_plain:
            return self._run(f"list {prefix}".strip(), collect_twice)
        return self._run(f"list {prefix}".strip(), collect)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        paths = [self._path(name) for name in names]

        def remove() -> None:
            try:
                self._api.delete(self._client, paths)
            except FileNotFoundError as error:
                if not self._is_missing(error):
                    raise

        if paths:
            self._run(f"delete {len(paths)} objects", remove)

    def probe(self) -> None:
        """Check that objects can be written, read, listed and deleted, and conditional writes.

        Takes about ten requests.

        Raises:
            ConfigError: If the bucket does not exist, credentials are missing, wrong or expired,
                access is denied, or the store ignores the conditions of a write.
            StoreError: If the store does not answer.
        """
        quick = replace(self._limits, retry_s=min(_PROBE_S, self._limits.retry_s))
        store = Store(self.url, self._client, self._api, quick, is_plain=self._is_plain)
        try:
            store._probe()
        except StoreError as error:
            if error.is_temporary:
                raise
            raise ConfigError(str(error)) from None

    def _probe(self) -> None:
        name = f"{_PROBES}/{secrets.token_hex(8)}"
        first, second, third = (json.dumps({"probe": number}).encode() for number in range(3))
        is_honoured = self.create(name, first) and not self.create(name, second)
        if is_honoured:
            tag = self.read(name)[1]
            self.replace(name, second, tag)
            with contextlib.suppress(ObjectChanged):
                self.replace(name, third, tag)
                is_honoured = False
        probes = self.list(_PROBES)
        now = max((one.modified for one in probes), default=0.0)
        old = [one.name for one in probes if one.modified < now - _OLD_PROBE_S]
        self.delete({name, *old})
        if not is_honoured:
            raise ConfigError(
                f"{self.url}: the store ignores the conditions of a write (If-None-Match, "
                f"If-Match), so that two runs could overwrite each other. Use another store."
            )

    def _path(self, name: str) -> str:
        return f"{self.url.prefix}/{name}".strip("/")

    def _run(self, action: str, call: Callable[[], _T]) -> _T:
        """Call until it succeeds, fails for good, or the time is over."""
        first: float | None = None
        pause_s = self._limits.pause_s
        for attempt in range(1, self._limits.attempts + 1):
            try:
                return call()
            except StoreError:
                raise
            except _OfSource as error:
                raise error.error from None
            except (self._api.exceptions.BaseError, OSError) as error:
                failure = classify(error, self.url)
            now = time.monotonic()
            first = now if first is None else first
            is_last = attempt == self._limits.attempts or now - first > self._limits.retry_s
            if is_last or not (failure.is_temporary or attempt < failure.attempts):
                break
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(pause_s * 2, 15)
        raise self._error(action, failure) from None

    def _error(self, action: str, failure: RequestFailure) -> StoreError:
        text = f"{self.url}: cannot {action}: {failure.reason}. {failure.advice}".strip()
        if failure.is_missing:
            return NoSuchObject(text)
        return StoreError(text, is_temporary=failure.is_temporary)


class _OfSource(Exception):
    """What is uploaded cannot be read."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _pieces(source: Path | bytes | Callable[[], Iterable[bytes]], part: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
    elif isinstance(source, Path):
        with open_regular(source) as file:
            while piece := file.read(part):
                yield piece
    else:
        yield from source()


class _Pieces:
    """Pieces of an upload; the last one is passed on only if the checksum of all matches."""

    def __init__(self, pieces: Iterator[bytes], xxh3_128: str | None) -> None:
        self._pieces = pieces
        self._expected = xxh3_128
        self._digest = xxhash.xxh3_128()
        self._next: bytes | None = None
        self.error: BaseException | None = None
        """Why they cannot be read."""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return self._advance()
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise

    def _advance(self) -> bytes:
        if self._next is None:
            self._next = self._read()
        piece, self._next = self._next, self._read()
        if piece is None:
            raise StopIteration
        return piece

    def _read(self) -> bytes | None:
        piece = next(self._pieces, None)
        if piece is not None and self._expected is not None:
            self._digest.update(piece)
        if piece is None and self._expected not in (None, self._digest.hexdigest()):
            raise DamagedObject(
                "the data to be uploaded do not match their checksum: they were damaged after "
                "they had been written"
            )
        return piece

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()
