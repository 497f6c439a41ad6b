"""Tokens of a split on disk, made once: a file of plain numbers that is mapped into memory.

The file's name is a digest of all that decides its content, so a change makes another file, and
two runs that make it at once write the same bytes: each to a name of its own, then one rename.
After the tokens comes a digest of them, which is compared before they are used.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

import numpy as np
import xxhash

from modelzoo_trainer.data.corpus import Document, Split, split_documents
from modelzoo_trainer.data.tokenization import Tokenization, Tokens
from modelzoo_trainer.errors import ConfigError

log = logging.getLogger("modelzoo_trainer.data.token_cache")

_FORMAT: Final = 1  # raise it when the same arguments are to give other tokens
_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 1 << 22


def default_cache_dir() -> Path:
    """Return the folder for tokens if the user names none."""
    return Path.home() / ".cache" / "modelzoo_trainer" / "tokens"


def cached_tokens(
    documents: Sequence[Document],
    tokenization: Tokenization,
    *,
    split: Split,
    val_fraction: float,
    cache_dir: Path,
) -> Path:
    """Return the file with the tokens of a split; make it if it is not there, or damaged.

    Args:
        documents: Of the whole corpus. If it is only one, the end of it is for validation.
        tokenization: Makes the tokens.
        split: Which part.
        val_fraction: Share of `val`.
        cache_dir: Where the file is; made if missing.

    Returns:
        A `.npy` file, mapped with `numpy.load(path, mmap_mode="r")`.

    Raises:
        ConfigError: If a document cannot be read, or the folder cannot be written.
    """
    part = (split, val_fraction) if len(documents) == 1 else None
    if part is None:
        documents = split_documents(documents, split, val_fraction)
    path = cache_dir / f"{_key(documents, tokenization, part)}.npy"
    dtype = np.min_scalar_type(tokenization.vocab_size - 1)
    if path.is_file():
        damage = _damage(path, dtype)
        if damage is None:
            log.info("tokens of split %r: %s", split, path)
            return path
        log.warning("tokens of split %r: %s is damaged (%s)", split, path, damage)
    log.info("tokens of split %r: making %s from %d documents", split, path, len(documents))
    parts = (tokenization.encode(_read(document)) for document in documents)
    if part is not None:
        parts = (_part(whole, *part) for whole in parts)
    _write(path, parts, dtype)
    return path


def _key(
    documents: Sequence[Document], tokenization: Tokenization, part: tuple[Split, float] | None
) -> str:
    files = []
    for document in documents:
        status = document.path.stat()
        files.append([document.name, status.st_size, status.st_mtime_ns])
    content = json.dumps([_FORMAT, tokenization.identity, files, part])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _damage(path: Path, dtype: np.dtype[Any]) -> str | None:
    """Return what is wrong with a file of tokens; None if nothing is.

    One that was written without a digest, by an earlier version, is judged by its size and type.
    """
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, found = np.lib.format.read_array_header_1_0(file)
            if found != dtype or len(shape) != 1:
                return f"it holds {found} of shape {shape} instead of a row of {dtype}"
            num_bytes = shape[0] * dtype.itemsize
            rest = os.fstat(file.fileno()).st_size - file.tell() - num_bytes
            if rest not in (0, _DIGEST_BYTES):
                return f"{abs(rest)} bytes too {'many' if rest > 0 else 'few'}"
            if rest and _digest_of(file, num_bytes) != file.read():
                return "the digest of the tokens is another one"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return None


def _digest_of(file: BinaryIO, num_bytes: int) -> bytes:
    digest = xxhash.xxh3_128()
    while num_bytes and (content := file.read(min(num_bytes, _READ_BYTES))):
        digest.update(content)
        num_bytes -= len(content)
    return digest.digest()


def _part(whole: Tokens, split: Split, val_fraction: float) -> Tokens:
    border = round(len(whole) * (1 - val_fraction))
    return {"train": whole[:border], "val": whole[border:], "all": whole}[split]


def _read(document: Document) -> bytes:
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data_dir: {str(document.path)!r} cannot be read ({error.strerror}). "
            "Make it readable, or leave it out with pattern."
        ) from error


def _write(path: Path, parts: Iterator[Tokens], dtype: np.dtype[Any]) -> None:
    temporary = path.with_name(f".{path.stem}-{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("xb")
    except OSError as error:
        raise ConfigError(
            f"cache_dir {str(path.parent)!r} cannot be written ({error.strerror}). "
            "Set cache_dir to a folder that can."
        ) from error
    try:
        with file:
            _write_header(file, dtype, 0)
            num_tokens, digest = 0, xxhash.xxh3_128()
            for part in parts:
                content = part.astype(dtype, copy=False).tobytes()
                file.write(content)
                digest.update(content)
                num_tokens += len(part)
            file.write(digest.digest())
            file.seek(0)
            _write_header(file, dtype, num_tokens)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    """Write the head of a `.npy` file; it leaves room for the longest number of tokens."""
    head = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, head)
