from __future__ import annotations

import builtins
import hashlib
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import xxhash
from obstore.store import MemoryStore

from modelzoo_trainer.checkpointing.stores import downloads
from modelzoo_trainer.checkpointing.stores import store as store_module
from modelzoo_trainer.checkpointing.stores.failures import classify
from modelzoo_trainer.checkpointing.stores.store import Store, open_store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import (
    CheckpointError,
    ConfigError,
    DamagedObject,
    NoSuchObject,
    ObjectChanged,
    StoreError,
    is_refusal_of_disk,
)
from tests.checkpointing.stores.faulty import BUSY, EXPIRED, LIMITS, faulty_store

SIZE = 100_003


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", 10_000)
    monkeypatch.setattr(downloads, "RANGE_BYTES", 7_000)


@pytest.fixture
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


def digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def test_a_file_comes_back(file: Path, content: bytes, tmp_path: Path) -> None:
    store, _ = faulty_store()
    store.put("a/file", file, xxh3_128=digest(content))
    store.download("a/file", tmp_path / "new", SIZE, digest(content))
    assert (tmp_path / "new").read_bytes() == content
    assert [one[:2] for one in store.list("a")] == [("a/file", SIZE)]


def test_pieces_and_bytes_come_back() -> None:
    store, _ = faulty_store()
    store.put("pieces", lambda: iter([b"a" * 30_000, b"b"]), size_bytes=30_001)
    store.put("bytes", b"abc")
    store.put("empty", b"")
    assert store.read("pieces")[0] == b"a" * 30_000 + b"b"
    assert store.read("bytes")[0] == b"abc"
    assert store.read("empty")[0] == b""


def test_an_empty_file_comes_back(tmp_path: Path) -> None:
    store, _ = faulty_store()
    (tmp_path / "empty").touch()
    store.put("empty", tmp_path / "empty", xxh3_128=digest(b""))
    store.download("empty", tmp_path / "new", 0, digest(b""))
    assert (tmp_path / "new").read_bytes() == b""


def test_a_file_that_was_damaged_on_disk_is_not_uploaded(file: Path, content: bytes) -> None:
    store, _ = faulty_store()
    with pytest.raises(DamagedObject, match="do not match their checksum"):
        store.put("file", file, xxh3_128=digest(content[:-1] + bytes([content[-1] ^ 1])))
    assert store.list() == []


def test_a_file_that_cannot_be_read_is_an_error_of_the_disk(tmp_path: Path) -> None:
    store, api = faulty_store()
    with pytest.raises(FileNotFoundError) as caught:
        store.put("file", tmp_path / "missing")
    assert not isinstance(caught.value, StoreError)
    with pytest.raises(PermissionError):
        store.put("file", _raise_denied, size_bytes=100_000)
    assert api.calls["put"] <= 1


def _raise_denied() -> Iterator[bytes]:
    yield b"x" * 10_000
    raise PermissionError("denied")


def test_an_upload_uses_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PART_BYTES", 1 << 20)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    store, api = faulty_store()
    sizes: list[int] = []
    api.put = lambda client, path, pieces, **keywords: sizes.extend(map(len, pieces))  # type: ignore[method-assign,assignment]
    tracemalloc.start()
    try:
        store.put("large", path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    assert sizes == [1 << 20] * 100


def test_a_large_file_has_fewer_parts_than_a_store_allows() -> None:
    sizes = [SIZE * number for number in (1, 10_000)]
    parts = [max(store_module.PART_BYTES, -(-size // store_module._MAX_PARTS)) for size in sizes]
    assert parts[0] == 10_000
    assert sizes[1] / parts[1] <= 10_000


def test_only_the_first_of_two_creates() -> None:
    store, _ = faulty_store()
    assert store.create("a", b"first")
    assert store.create("a", b"first")  # ours, whose answer may have been lost
    assert not store.create("a", b"second")
    assert store.read("a")[0] == b"first"


def test_an_object_is_replaced_only_if_it_did_not_change() -> None:
    store, _ = faulty_store()
    store.create("a", b"1")
    _, old = store.read("a")
    new = store.replace("a", b"2", old)
    with pytest.raises(ObjectChanged):
        store.replace("a", b"3", old)
    assert store.read("a") == (b"2", new)
    with pytest.raises(ObjectChanged):
        store.replace("missing", b"3", new)


def test_what_does_not_exist_is_an_error_of_its_own(tmp_path: Path) -> None:
    store, _ = faulty_store()
    with pytest.raises(NoSuchObject, match=r"memory://bucket/run: cannot read a"):
        store.read("a")
    with pytest.raises(NoSuchObject):
        store.download("a", tmp_path / "new", 3, None)
    assert not (tmp_path / "new").exists()
    store.delete(["a", "b"])
    store.delete([])
    assert store.list("a") == []


def test_damage_is_downloaded_again_and_then_refused(tmp_path: Path) -> None:
    store, api = faulty_store()
    store.put("a", b"abc")
    with pytest.raises(DamagedObject, match="3 times"):
        store.download("a", tmp_path / "new", 3, digest(b"abd"))
    assert api.calls["get_range"] == 3
    with pytest.raises(DamagedObject, match="ends before byte 4"):
        store.download("a", tmp_path / "new", 4, digest(b"abc"))
    assert list(tmp_path.iterdir()) == []


def test_a_download_never_writes_over_a_file(tmp_path: Path) -> None:
    store, _ = faulty_store()
    store.put("a", b"abc")
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        store.download("a", tmp_path / "old", 3, None)
    assert (tmp_path / "old").read_bytes() == b"old"


def test_no_space_is_found_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    store, api = faulty_store()
    store.put("a", b"abc")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        store.download("a", tmp_path / "new", 3, None)
    assert api.calls["get_range"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [BUSY, "lost", "twice", "kind: Timeout"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.slow_cases(every=4)
def test_every_operation_survives_faults(
    fault: str, number: int, file: Path, content: bytes, tmp_path: Path
) -> None:
    names = ("put", "get", "get_range", "list", "delete")
    store, api = faulty_store(*((name, fault) for name in names for _ in range(number)))
    store.put("file", file, xxh3_128=digest(content))
    store.download("file", tmp_path / "new", SIZE, digest(content))
    assert (tmp_path / "new").read_bytes() == content
    assert [one.name for one in store.list()] == ["file"]
    store.read("file")
    store.delete(["file"])
    assert store.list() == []
    assert fault == "twice" or api.plan == []


@pytest.mark.parametrize("fault", [BUSY, "lost", "twice"])
def test_conditional_writes_survive_faults(fault: str) -> None:
    store, api = faulty_store(("put", fault))
    assert store.create("a", b"1")
    api.plan.append(("put", fault))
    assert not store.create("a", b"2")
    _, tag = store.read("a")
    api.plan.append(("put", fault))
    tag = store.replace("a", b"2", tag)
    assert store.read("a") == (b"2", tag)
    assert api.plan == []


def test_an_error_that_lasts_is_temporary_and_ends() -> None:
    store, api = faulty_store(*[("put", BUSY)] * 10)
    with pytest.raises(
        StoreError, match=r"cannot create a: the store answered .*SlowDown"
    ) as error:
        store.create("a", b"1")
    assert error.value.is_temporary
    assert api.calls["put"] == 4


def test_an_expired_token_is_not_tried_again() -> None:
    store, api = faulty_store(("put", EXPIRED))
    with pytest.raises(StoreError, match="credentials have expired") as caught:
        store.put("a", b"1")
    assert not caught.value.is_temporary
    assert api.calls["put"] == 1
    failed = CheckpointError("not saved")
    failed.__cause__ = caught.value
    assert is_refusal_of_disk(failed)  # training continues


def test_a_request_that_was_damaged_on_the_way_is_repeated_if_its_signature_is_refused() -> None:
    refused = "status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code></Error>"
    store, api = faulty_store(("put", refused), ("put", refused))
    store.put("a", b"1")
    assert store.read("a")[0] == b"1"
    assert api.calls["put"] == 3


def test_a_signature_that_is_always_refused_is_not_called_wrong_credentials_alone() -> None:
    refused = "status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code></Error>"
    store, api = faulty_store(*[("put", refused)] * 9)
    with pytest.raises(StoreError, match="They are wrong, or requests are changed") as caught:
        store.put("a", b"1")
    assert not caught.value.is_temporary
    assert api.calls["put"] == 3


@pytest.mark.parametrize(
    ("text", "found", "is_temporary"),
    [
        ("<Code>NoSuchBucket</Code>", "bucket 'b' does not exist", False),
        (
            "<Code>SignatureDoesNotMatch</Code> secret hunter2",
            "credentials are not accepted",
            False,
        ),
        ("<Code>InvalidAccessKeyId</Code>", "credentials are not accepted", False),
        ("<Code>AccessDenied</Code>", "access is denied", False),
        ("status code: 403 Forbidden", "access is denied", False),
        ("<Code>RequestTimeTooSkewed</Code>", "clock of this machine differs", False),
        ("PUT http://169.254.169.254/latest/api/token", "no credentials", False),
        ("<Code>PermanentRedirect</Code>", "another region", False),
        ("status code: 507", "no space left", False),
        ("<Code>BadDigest</Code>", "damaged on the way", True),
        ("status code: 400 Bad Request", "refused the request", True),
        ("status code: 400: <Code>ExpiredToken</Code>", "have expired", False),
        ("Got invalid list response: ill-formed document", "interrupted", True),
        ("status code: 429", "answered with an error", True),
        ("kind: Connect", "cannot be reached", True),
        ("kind: Timeout", "did not answer in time", True),
        ("UnknownIssuer", "certificate", False),
        ("BadScheme", "not encrypted", False),
        ("Something at http://x/y?sig=hunter2 <token>hunter2</token>\nhunter2", "Something", False),
    ],
)
def test_errors_have_our_words_and_no_secrets(text: str, found: str, is_temporary: bool) -> None:
    failure = classify(obstore.exceptions.GenericError(text), StoreUrl("s3", "b"))
    assert found in failure.reason
    assert failure.is_temporary == is_temporary
    assert "hunter2" not in failure.reason + failure.advice


def test_a_probe_leaves_nothing_behind() -> None:
    store, _ = faulty_store()
    store.probe()
    assert store.list() == []


@pytest.mark.parametrize("ignored", ["create", "replace"])
def test_a_store_that_ignores_conditions_is_refused(ignored: str) -> None:
    store, api = faulty_store()

    def put(client: Any, path: str, data: bytes, *, mode: Any) -> Any:
        is_ignored = (mode == "create") == (ignored == "create")
        return obstore.put(client, path, data, mode="overwrite" if is_ignored else mode)

    api.put = put  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="ignores the conditions"):
        store.probe()
    assert store.list() == []


def test_a_probe_tells_a_mistake_from_a_store_that_is_down() -> None:
    store, _ = faulty_store(("put", EXPIRED))
    with pytest.raises(ConfigError, match="have expired"):
        store.probe()
    store, _ = faulty_store(*[("put", BUSY)] * 10)
    with pytest.raises(StoreError):
        store.probe()


def test_stores_in_memory_have_names() -> None:
    one, other = open_store("memory://one/a"), open_store("memory://one/a")
    one.put("x", b"1")
    assert other.read("x")[0] == b"1"
    assert open_store("memory://two/a").list() == []
    assert [each.name for each in open_store("memory://one").list()] == ["a/x"]


@pytest.mark.parametrize(
    ("url", "options", "found"),
    [
        ("s3://b/a", {"endpont": "http://x"}, "Did you mean 'endpoint'"),
        ("s3://b/a", {"secret_access_key": "hunter2"}, "environment variables"),
        ("s3://b/a", {"session_token": "hunter2"}, "environment variables"),
        ("s3://b/a", {"endpoint": "http://user:hunter2@x"}, "remove the user name"),
        ("s3://b/a", {"request_seconds": 0}, "positive number"),
        ("memory://b/a", {"region": "x"}, "has no options"),
        ("file:///a", {}, "is a folder"),
    ],
)
def test_invalid_options_are_refused(url: str, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    assert found in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_half_of_the_credentials_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(ConfigError, match="no credentials were found") as caught:
        open_store("s3://bucket/a")
    assert "hunter2" not in str(caught.value)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **keywords: Any) -> Any:
        if name == "obstore":
            raise ModuleNotFoundError("No module named 'obstore'", name="obstore")
        return imported(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'modelzoo-trainer\[cloud\]'"):
        open_store("s3://bucket/a")


@pytest.mark.parametrize("e_tag", [None, '"of-another-kind"'])
def test_a_damaged_answer_without_encryption_is_noticed(e_tag: str | None) -> None:
    client = MemoryStore()
    obstore.put(client, "run/a", b"right")
    _, api = faulty_store(client=client)
    answers = iter([b"wrong", b"right", b"Right", b"right", b"right"])

    def get(client: Any, path: str) -> Any:
        meta = obstore.head(client, path)
        return _Found({**meta, "e_tag": e_tag}, next(answers))

    api.get = get  # type: ignore[method-assign,assignment]
    store = Store(StoreUrl("s3", "b", "run"), client, api, LIMITS, is_plain=True)
    assert store.read("a")[0] == b"right"
    assert next(answers, None) is None


def test_an_answer_with_its_checksum_is_read_once() -> None:
    client = MemoryStore()
    obstore.put(client, "run/a", b"right")
    _, api = faulty_store(client=client)
    answers = iter([b"wrong", b"right"])

    def get(client: Any, path: str) -> Any:
        meta = obstore.head(client, path)
        return _Found({**meta, "e_tag": f'"{hashlib.md5(b"right").hexdigest()}"'}, next(answers))

    api.get = get  # type: ignore[method-assign,assignment]
    store = Store(StoreUrl("s3", "b", "run"), client, api, LIMITS, is_plain=True)
    assert store.read("a")[0] == b"right"
    assert next(answers, None) is None


def test_a_damaged_listing_without_encryption_is_noticed() -> None:
    client = MemoryStore()
    obstore.put(client, "run/a", b"1")
    _, api = faulty_store(client=client)
    damaged = [[{**obstore.head(client, "run/a"), "path": "run/b"}]]

    def listed(client: Any, prefix: str) -> Any:
        return [damaged.pop()] if damaged else obstore.list(client, prefix)

    api.list = listed  # type: ignore[method-assign,assignment]
    store = Store(StoreUrl("s3", "b", "run"), client, api, LIMITS, is_plain=True)
    assert [one.name for one in store.list()] == ["a"]


class _Found:
    def __init__(self, meta: Any, data: bytes) -> None:
        self.meta, self._data = meta, data

    def bytes(self) -> bytes:
        return self._data


def test_the_description_of_a_store_is_its_url() -> None:
    assert repr(Store(StoreUrl("s3", "b", "a"), None, None, None)) == "Store('s3://b/a')"  # type: ignore[arg-type]
