"""Checkpoints whose files were changed by somebody who can also write digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
STATE = "state.json"
_DIGEST = "xxh3_128"


def seal(path: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Write the manifest of a checkpoint anew, so that sizes and digests are right.

    Args:
        path: The checkpoint.
        change: Changes the manifest before it gets its own digest.
    """
    manifest = json.loads((path / MANIFEST).read_text(encoding="ascii"))
    del manifest[_DIGEST]
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        record = {"size_bytes": len(data), _DIGEST: xxhash.xxh3_128_hexdigest(data)}
        manifest["files"][name] = record
    if change is not None:
        change(manifest)
    write_manifest(path, manifest)


def write_manifest(path: Path, manifest: Any) -> None:
    """Write a manifest with its own digest, as far as it can have one."""
    if isinstance(manifest, dict):
        plain = json.dumps(manifest, sort_keys=True).encode("ascii")
        manifest = manifest | {_DIGEST: xxhash.xxh3_128_hexdigest(plain)}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (path / MANIFEST).write_text(text, encoding="ascii")
