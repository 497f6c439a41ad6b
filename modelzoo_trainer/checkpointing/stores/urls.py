"""URLs of object stores."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from modelzoo_trainer.errors import ConfigError

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
_MEANT: Final = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "wasb": "az",
    "wasbs": "az",
}
# One slash is enough: `Path("s3://bucket")` has only one. A single letter is a drive.
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/{1,3})")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXAMPLE: Final = "Write it as s3://BUCKET/PATH"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A prefix in a bucket.

    Args:
        scheme: s3, gs, az or memory.
        bucket: Bucket; for Azure, container; for memory, a name in this process.
        prefix: Path in the bucket without slashes at its ends; may be empty.
    """

    scheme: str
    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def __truediv__(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, self.bucket, f"{self.prefix}/{name}".strip("/"))


def is_url(text: str | Path) -> bool:
    """Return whether a setting is a URL, valid or not, and not a path."""
    return _URL.match(str(text)) is not None


def parse_url(text: str | Path, setting: str = "") -> StoreUrl | Path:
    """Parse the URL of a folder.

    Args:
        text: A URL.
        setting: Name of its setting, for messages.

    Returns:
        The URL of an object store; for `file://`, a path.

    Raises:
        ConfigError: If it is not a valid URL of a known scheme, or contains credentials or a query.
            The message does not repeat these.
    """
    given = str(text)
    where = f"{setting}: " if setting else ""
    found = _URL.match(given)
    if found is None:
        raise ConfigError(f"{where}{given!r} is not a URL. {_EXAMPLE}.")
    scheme = _scheme(found["scheme"], where)
    rest = given[found.end() :]
    shown = f"{scheme}://..."
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"{where}{shown} contains a user name or credentials before '@'. Remove them: "
            f"credentials come from environment variables or the role of the machine."
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(
            f"{where}{shown} contains a query or fragment ('?' or '#'), which is not supported. "
            f"Remove it; pass settings of the store as options and credentials as environment "
            f"variables."
        )
    if scheme == "file":
        return _path(given, where)
    if found["slashes"] == "/":
        raise ConfigError(
            f"{where}{given!r} has one slash after the scheme, as if it had been a Path. Pass the "
            f"URL as a string: {scheme}://{rest}."
        )
    if found["slashes"] == "///":
        raise ConfigError(f"{where}{given!r} names no bucket. {_EXAMPLE}.")
    return _bucket(scheme, rest, f"{where}{given!r}")


def _bucket(scheme: str, rest: str, given: str) -> StoreUrl:
    """Return the URL of a bucket and the path in it."""
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{given} names no bucket. {_EXAMPLE}.")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{given}: the bucket {bucket!r} may consist of letters, digits, '-', '_' and '.' "
            f"only. {_EXAMPLE}."
        )
    prefix = path.strip("/")
    if prefix and not all(map(_is_segment, prefix.split("/"))):
        raise ConfigError(
            f"{given}: the path must not contain empty parts, '.', '..', backslashes or control "
            f"characters."
        )
    return StoreUrl(scheme, bucket, prefix)


def _scheme(given: str, where: str) -> str:
    scheme = given.lower()
    if scheme in SCHEMES:
        return scheme
    meant = _MEANT.get(scheme)
    advice = f"Did you mean {meant}://?" if meant else "Known: " + ", ".join(SCHEMES) + "."
    raise ConfigError(f"{where}{given + '://'!r} is not a known scheme of URLs. {advice}")


def _path(given: str, where: str) -> Path:
    """Return the path of a file URL; it is on this machine."""
    parts = urlsplit(given)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{where}{given!r} names the host {parts.netloc!r}. Write a path of this machine with "
            f"three slashes: file:///PATH."
        )
    return Path(unquote(parts.path))


def _is_segment(name: str) -> bool:
    return name not in ("", ".", "..") and name.isprintable() and "\\" not in name
