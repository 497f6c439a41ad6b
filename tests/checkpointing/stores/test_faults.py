"""Each request of each operation on an object store fails once, in each way."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import xxhash

from modelzoo_trainer.checkpointing.stores.store import Store, open_store
from modelzoo_trainer.errors import ConfigError, ObjectChanged, StoreError
from tests.checkpointing.stores.fault_proxy import ANSWERS, FAULTS, FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, READER, SECRET, S3Server, options_of

pytestmark = pytest.mark.slow
PART: Final = 5 << 20
CONTENT: Final = random.Random(0).randbytes(2 * PART + 12_345)
DIGEST: Final = xxhash.xxh3_128(CONTENT).hexdigest()
LIMITS: Final = {"request_seconds": 3, "retry_seconds": 30}
_NUMBERS: Final = itertools.count()


@pytest.fixture
def store(proxy: FaultProxy) -> Store:
    url = f"s3://{BUCKET}/faults-{os.getpid()}-{next(_NUMBERS)}"
    return open_store(url, options_of(proxy.port) | LIMITS)


def put(store: Store, folder: Path) -> None:
    file = folder / "source"
    file.write_bytes(CONTENT)
    store.put("put", file, xxh3_128=DIGEST)
    assert store.read("put")[0] == CONTENT


def put_small(store: Store, folder: Path) -> None:
    store.put("small", CONTENT[:1000])
    assert store.read("small")[0] == CONTENT[:1000]


def create(store: Store, folder: Path) -> None:
    assert store.create("created", b"first")
    assert not store.create("created", b"second")
    assert store.read("created")[0] == b"first"


def replace(store: Store, folder: Path) -> None:
    store.put("replaced", b"0")
    _, old = store.read("replaced")
    new = store.replace("replaced", b"1", old)
    with pytest.raises(ObjectChanged):
        store.replace("replaced", b"2", old)
    assert store.read("replaced") == (b"1", new)


def download(store: Store, folder: Path) -> None:
    store.put("put", CONTENT)
    store.download("put", folder / "new", len(CONTENT), DIGEST)
    assert (folder / "new").read_bytes() == CONTENT


def list_objects(store: Store, folder: Path) -> None:
    for name in ("b/2", "b/1", "c"):
        store.put(name, b"x")
    assert [one[:2] for one in store.list("b")] == [("b/1", 1), ("b/2", 1)]


def delete(store: Store, folder: Path) -> None:
    for name in ("b", "c", "d"):
        store.put(name, b"x")
    store.delete(["b", "c", "missing"])
    assert [one.name for one in store.list()] == ["d"]


REQUESTS: Final[dict[str, tuple[str, Callable[[Store, Path], None]]]] = {
    "start of a multipart upload": ("start", put),
    "part of a multipart upload": ("part", put),
    "end of a multipart upload": ("complete", put),
    "upload of a small object": ("put", put_small),
    "creation": ("create", create),
    "replacement": ("replace", replace),
    "range of a download": ("get", download),
    "listing": ("list", list_objects),
    "deletion": ("delete", delete),
}


# CI: each fault of an upload and of a download; each request refused, and done but not answered;
# what must not be done twice, twice.
@pytest.mark.soak_cases(
    "*",
    "!part of a multipart upload-*",
    "!range of a download-*",
    "!*-503",
    "!*-lost reply",
    "!creation-duplicate",
    "!replacement-duplicate",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("request_of", REQUESTS)
def test_a_request_that_fails_once_loses_and_damages_nothing(
    request_of: str,
    fault: str,
    store: Store,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr("modelzoo_trainer.checkpointing.stores.store.PART_BYTES", PART)
    kind, act = REQUESTS[request_of]
    proxy.fail_once(kind, fault)
    act(store, tmp_path)
    assert [request.fault for request in proxy.faults] == [fault]
    record_property("requests_failed", 1)


@pytest.mark.parametrize("kind", ["get", "put", "create", "list"])
def test_a_store_that_always_fails_ends_in_a_temporary_error(
    kind: str, store: Store, proxy: FaultProxy
) -> None:
    store.put("x", b"1")
    proxy.choose = lambda found, target: "503" if found == kind else None
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: store.read("x"),
        "put": lambda: store.put("x", b"2"),
        "create": lambda: store.create("y", b"2"),
        "list": store.list,
    }
    with pytest.raises(StoreError) as caught:
        acts[kind]()
    assert caught.value.is_temporary
    assert SECRET not in str(caught.value)


def test_an_expired_token_ends_at_once(store: Store, proxy: FaultProxy) -> None:
    proxy.choose = lambda kind, target: "expired"
    with pytest.raises(StoreError, match="credentials have expired") as caught:
        store.put("x", b"1")
    assert not caught.value.is_temporary
    assert len(proxy.requests) == 1
    assert set(ANSWERS) == {"500", "503", "expired"}


def test_a_probe_passes_and_leaves_nothing(store: Store) -> None:
    store.probe()
    assert store.list() == []


@pytest.mark.parametrize(
    ("environment", "bucket", "found"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, BUCKET, "credentials are not accepted"),
        ({"AWS_ACCESS_KEY_ID": "wrong-key"}, BUCKET, "credentials are not accepted"),
        ({"AWS_ACCESS_KEY_ID": READER}, BUCKET, "access is denied"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, BUCKET, "no credentials"),
    ],
)
def test_mistakes_are_found_before_the_first_step(
    environment: dict[str, str | None],
    bucket: str,
    found: str,
    s3: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        open_store(f"s3://{bucket}/a", s3.options | LIMITS).probe()
    assert found in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "wrong-" not in str(caught.value)


def test_an_endpoint_that_does_not_answer_is_named(proxy: FaultProxy) -> None:
    options = {"endpoint": "http://127.0.0.1:1", "request_seconds": 1, "retry_seconds": 1}
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        open_store(f"s3://{BUCKET}/a", options).probe()
    assert caught.value.is_temporary
