from __future__ import annotations

from pathlib import Path

import pytest

from modelzoo_trainer.checkpointing.stores.urls import StoreUrl, is_url, parse_url
from modelzoo_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a/b", StoreUrl("s3", "bucket", "a/b")),
        ("s3://my.bucket-1/", StoreUrl("s3", "my.bucket-1")),
        ("S3://bucket/a b/", StoreUrl("s3", "bucket", "a b")),
        ("gs://bucket", StoreUrl("gs", "bucket")),
        ("az://container/run", StoreUrl("az", "container", "run")),
        ("memory://name/run", StoreUrl("memory", "name", "run")),
        ("file:///data/a%20b", Path("/data/a b")),
        ("file://localhost/data", Path("/data")),
    ],
)
def test_a_url_is_parsed(text: str, expected: StoreUrl | Path) -> None:
    assert is_url(text)
    assert parse_url(text) == expected


def test_a_url_is_printed_as_it_is_parsed() -> None:
    assert str(StoreUrl("s3", "bucket", "a") / "b/c") == "s3://bucket/a/b/c"
    assert str(StoreUrl("s3", "bucket")) == "s3://bucket"


@pytest.mark.parametrize("path", ["runs/a", "./s3", "/s3/a", "a:b", "C:/runs", Path("runs"), "s3"])
def test_a_path_is_not_a_url(path: str | Path) -> None:
    assert not is_url(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://", "names no bucket"),
        ("s3:///a", "names no bucket"),
        ("s3://bu cket/a", "'bu cket'"),
        ("s3://bucket/a//b", "empty parts"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a\nb", "control characters"),
        (Path("s3://bucket/a"), "as a string: s3://bucket/a"),
        ("gcs://bucket/a", "Did you mean gs://"),
        ("s3a://bucket/a", "Did you mean s3://"),
        ("https://bucket/a", "Known: s3, gs"),
        ("file://host/a", "names the host 'host'"),
        ("runs/a", "is not a URL"),
    ],
)
def test_an_invalid_url_is_refused(text: str | Path, found: str) -> None:
    with pytest.raises(ConfigError, match=r"^model_dir: ") as caught:
        parse_url(text, "model_dir")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://KEY:hunter2@bucket/a",
        "s3://hunter2@bucket",
        "az://container/a?sig=hunter2",
        "s3://bucket/a#hunter2",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="Remove") as caught:
        parse_url(text, "model_dir")
    assert "hunter2" not in str(caught.value)
