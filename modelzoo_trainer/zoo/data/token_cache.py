"""Tokenized text files: documents of a split, cached tokens, and windows of them."""

import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from modelzoo_trainer.base.regular_files import open_regular
from modelzoo_trainer.errors import ConfigError, folder_reason, reason_of
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.tokenization import Tokenization, Tokens

Split = Literal["train", "val", "all"]

STDLIB: Final = "stdlib"
"""Value of `data_dir` for the standard library of the running Python."""

_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_DEFAULT_PATTERN: Final = "**/*.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """A text file of a corpus."""

    path: Path
    # its path relative to the given folder, with `/`; it determines the split, so that a corpus
    # is split the same way wherever it is
    name: str

    @property
    def fraction(self) -> float:
        """A number between 0 and 1 given by the name, uniformly distributed over names."""
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def find_documents(data_dir: str | Sequence[str], pattern: str | None) -> list[CorpusFile]:
    """Return the documents of a corpus, each file once, ordered by name.

    `data_dir`: one or more folders, files, glob patterns, or `stdlib`. `pattern`: glob of the files
    in a folder; None = `**/*.txt`. For `stdlib` it is always the Python files, without tests and
    installed packages.

    Raises:
        ConfigError: If a folder is missing, or no file is found.
    """
    places = [data_dir] if isinstance(data_dir, str) else list(data_dir)
    found = [document for place in places for document in _find(place, pattern)]
    if not found:
        raise ConfigError(
            f"data_dir {data_dir!r} has no file that matches pattern "
            f"{pattern or _DEFAULT_PATTERN!r}. Set pattern to match the files, "
            "for example '**/*.md'."
        )
    if len(places) > 1:
        found = list({document.path.resolve(): document for document in reversed(found)}.values())
    return sorted(found, key=lambda document: (document.fraction, document.name))


def split_documents(
    documents: Iterable[CorpusFile], split: Split, val_fraction: float
) -> list[CorpusFile]:
    """Return the documents of one split; adding a document moves no other one.

    Raises:
        ConfigError: If there are none.
    """
    documents = list(documents)
    if split == "all":
        return documents
    chosen = [
        document for document in documents if (document.fraction < val_fraction) == (split == "val")
    ]
    if not chosen:
        raise ConfigError(
            f"split {split!r} has no document: with val_fraction {val_fraction}, all "
            f"{len(documents)} documents are in the other split. Change val_fraction, or add "
            f"files to data_dir."
        )
    return chosen


def _find(place: str, pattern: str | None) -> list[CorpusFile]:
    if place == STDLIB:
        return _library(Path(sysconfig.get_path("stdlib")))
    path = Path(place).expanduser()
    if path.is_dir():
        matches = (match for match in path.glob(pattern or _DEFAULT_PATTERN) if match.is_file())
        return [_below(path, match) for match in matches]
    if path.is_file():
        return [CorpusFile(path=path, name=path.name)]
    if glob.has_magic(place):
        found = (Path(match) for match in glob.glob(str(path), recursive=True))
        return [CorpusFile(path=match, name=match.name) for match in found if match.is_file()]
    raise ConfigError(_missing(place))


def missing_places(data_dir: str | Sequence[str]) -> list[str]:
    """Return a message for each path of a corpus that does not exist; no folder is read."""
    places = [data_dir] if isinstance(data_dir, str) else data_dir
    return [
        _missing(place)
        for place in places
        if place != STDLIB and not glob.has_magic(place) and not Path(place).expanduser().exists()
    ]


def _missing(place: str) -> str:
    return (
        f"data_dir {place!r} does not exist. Give a folder, a file, a glob pattern, or "
        f"{STDLIB!r} for the standard library."
    )


def _library(root: Path) -> list[CorpusFile]:
    found = []
    for folder, subfolders, files in os.walk(root):
        # In place, so that installed packages are not traversed.
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found += [_below(root, Path(folder, name)) for name in files if name.endswith(".py")]
    return found


def _below(root: Path, path: Path) -> CorpusFile:
    return CorpusFile(path=path, name=path.relative_to(root).as_posix())


class TokenWindows(BatchDataset):
    """Consecutive windows of tokens without overlap; an incomplete one at the end is dropped.

    `path`: a `.npy` file of tokens, memory-mapped by each process.

    Shapes:
        A batch: input_ids and labels (B, length), int32.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self.length = length
        self._tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        self._steps = np.arange(length + 1)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self._tokens)

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window, without a batch dimension."""
        return {key: rows[0] for key, rows in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of these windows."""
        starts = np.asarray(indices, dtype=np.int64) * self.length
        windows = self._tokens[starts[:, None] + self._steps]  # copies: the file is not modified
        return {
            "input_ids": torch.from_numpy(windows[:, :-1].astype(np.int32)),
            "labels": torch.from_numpy(windows[:, 1:].astype(np.int32)),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "length": self.length}  # a memory map would be pickled as a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # opens the file again


log = logging.getLogger("modelzoo_trainer.data.token_cache")

_FORMAT: Final = 1  # increase it when the same arguments give different tokens
_DIGEST_BYTES: Final = 16
_SAID: Final[set[Path]] = set()
_READ_BYTES: Final = 1 << 22


def default_cache_dir() -> Path:
    """Return the default folder of the token cache."""
    return Path.home() / ".cache" / "modelzoo_trainer" / "tokens"


def cached_tokens(
    documents: Sequence[CorpusFile],
    tokenization: Tokenization,
    *,
    split: Split,
    val_fraction: float,
    cache_dir: Path,
) -> Path:
    """Return the file with the tokens of a split; build it if it is missing or damaged.

    `documents`: of the whole corpus. If there is only one, its end is the validation data.
    `cache_dir`: folder of the file; created if missing.

    Returns:
        A `.npy` file, to be mapped with `numpy.load(path, mmap_mode="r")`.

    Raises:
        ConfigError: If a document cannot be read, or the folder cannot be written.
    """
    part = (split, val_fraction) if len(documents) == 1 else None
    if part is None:
        documents = split_documents(documents, split, val_fraction)
    path = cache_dir / f"{_key(documents, tokenization, part)}.npy"
    dtype = np.min_scalar_type(tokenization.vocab_size - 1)
    if path.is_file():
        damage = damage_of(path, dtype)
        if damage is None:
            _say_once("Using the cached tokens of split %r: %s", split, path)
            return path
        text = "The file of cached tokens of split %r is damaged (%s); rebuilding %s"
        log.warning(text, split, damage, path)
    log.info("Tokenizing split %r into %s (documents: %d)", split, path, len(documents))
    parts = (tokenization.encode(_read(document)) for document in documents)
    if part is not None:
        parts = (_part(whole, *part) for whole in parts)
    write_tokens(path, parts, dtype)
    return path


def _say_once(text: str, split: Split, path: Path) -> None:
    """Log a notice, in a process once: a dataloader is created for each validation."""
    if path not in _SAID:
        _SAID.add(path)
        log.info(text, split, path)


def _key(
    documents: Sequence[CorpusFile], tokenization: Tokenization, part: tuple[Split, float] | None
) -> str:
    files = []
    for document in documents:
        status = document.path.stat()
        files.append([document.name, status.st_size, status.st_mtime_ns])
    content = json.dumps([_FORMAT, tokenization.identity, files, part])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def damage_of(path: Path, dtype: np.dtype[Any]) -> str | None:
    """Return what is wrong with a file that `write_tokens` wrote; None if it is intact.

    A file without a digest, written by an earlier version, is checked by size and dtype.
    """
    try:
        with open_regular(path) as file:
            np.lib.format.read_magic(file)
            shape, _, found = np.lib.format.read_array_header_1_0(file)
            if found != dtype or len(shape) != 1:
                return f"expected a 1-D array of {dtype}, found {found} of shape {shape}"
            num_bytes = shape[0] * dtype.itemsize
            rest = os.fstat(file.fileno()).st_size - file.tell() - num_bytes
            if rest not in (0, _DIGEST_BYTES):
                return f"{abs(rest)} bytes too {'many' if rest > 0 else 'few'}"
            if rest and _digest_of(file, num_bytes) != file.read():
                return "the digest does not match"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return None


def _digest_of(file: IO[bytes], num_bytes: int) -> bytes:
    digest = xxhash.xxh3_128()
    while num_bytes and (content := file.read(min(num_bytes, _READ_BYTES))):
        digest.update(content)
        num_bytes -= len(content)
    return digest.digest()


def _part(whole: Tokens, split: Split, val_fraction: float) -> Tokens:
    border = round(len(whole) * (1 - val_fraction))
    return {"train": whole[:border], "val": whole[border:], "all": whole}[split]


def _read(document: CorpusFile) -> bytes:
    try:
        return document.path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data_dir: {str(document.path)!r} cannot be read ({reason_of(error)}). "
            "Make it readable, or set pattern to a glob that does not match it."
        ) from error


def write_tokens(path: Path, parts: Iterator[Tokens], dtype: np.dtype[Any]) -> None:
    """Write a one-dimensional array with a digest; a file that is there is replaced as a whole.

    Args:
        path: The `.npy` file; its folder is created if missing.
        parts: Parts of the array, in order.
        dtype: The file's.

    Raises:
        ConfigError: If the folder cannot be written.
    """
    temporary = path.with_name(f".{path.stem}-{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("xb")
    except OSError as error:
        raise ConfigError(
            f"cache_dir {str(path.parent)!r} cannot be written "
            f"({folder_reason(path.parent, error)}). "
            "Set cache_dir to a writable folder."
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
    """Write the header of a `.npy` file, with room for the longest number of tokens."""
    head = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, head)
