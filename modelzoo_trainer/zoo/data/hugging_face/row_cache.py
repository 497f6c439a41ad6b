"""Rows of tokens on disk, made once and read by all processes.

A file `KEY.npy` has the rows one after another without what fills them, `KEY-ends.npy` where each
one ends, and `KEY.json`, which is written last, their shape.

Dimension letters: N rows, F features, S positions, B batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError, folder_reason
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, to_send
from modelzoo_trainer.zoo.data.hugging_face.encoding import CHUNK, Encoding
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER, unreadable
from modelzoo_trainer.zoo.data.token_cache import damage_of, write_tokens
from modelzoo_trainer.zoo.rows.interface import Stats

log = logging.getLogger("modelzoo_trainer.data.hugging_face")

_FORMAT: Final = 2  # increase it when the same arguments give other rows
_SAID: Final[set[str]] = set()
_ADVICE: Final = {
    "too long": "To cut them, set truncation, or increase max_sequence_length",
    "template refuses": "Set chat_template to one that takes them, or change their messages",
    "chat template": "Set chat_template to one that writes each message once and as it is",
    "no token counts": "Rows need an answer",
}

Ints = npt.NDArray[np.int64]


class CachedRows(BatchDataset):
    """The rows of files that `cached_rows` has written.

    Args:
        path: Without a suffix.
        encoding: Has made them.
        length: S.
        check: Compares the encoding with a model; see `check_model`.

    Shapes:
        A batch: what `encoding.batch` makes of (F, B, S).
    """

    def __init__(
        self,
        path: Path,
        encoding: Encoding,
        length: int,
        check: Callable[[int | None, int | None], None],
    ) -> None:
        self.path = path
        self.encoding = encoding
        self.length = length
        self._check = check
        self.fingerprint = int(path.name[:8], 16)
        self._fill = np.array(encoding.fill, np.int32)[:, None, None]
        self._open()

    def _open(self) -> None:
        self._values: npt.NDArray[Any] = np.load(_values_of(self.path), mmap_mode="r")
        self._ends: Ints = np.load(_ends_of(self.path), mmap_mode="r")

    def __len__(self) -> int:
        return len(self._ends)

    @override
    def __getitem__(self, index: int) -> Any:
        """Return one row, without a batch dimension."""
        return {key: rows[0] for key, rows in self.__getitems__([index]).items()}

    @override
    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the batch of these rows."""
        features = self.encoding.features
        rows = np.empty((len(features), len(indices), self.length), np.int32)
        rows[:] = self._fill
        for place, index in enumerate(indices):
            start = int(self._ends[index - 1]) if index % len(self) else 0
            values = self._values[start : int(self._ends[index])].reshape(len(features), -1)
            rows[:, place, : values.shape[1]] = values
        return to_send(rows, self.encoding.batch, features)

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check that the rows fit a model.

        Raises:
            ConfigError: If they do not.
        """
        self._check(vocab_size, max_position_embeddings)

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "encoding", "length", "_check")
        return {name: getattr(self, name) for name in names}  # a memory map would be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state.values())  # type: ignore[misc]  # opens the files again


def cached_rows(dataset: Any, encoding: Encoding, cache_dir: Path, where: str) -> Path:
    """Return the path of the rows of a dataset; make them if they are missing or damaged.

    One process of a machine makes them, others wait for it.

    Args:
        dataset: A `datasets.Dataset`.
        encoding: Makes the rows.
        cache_dir: Created if missing.
        where: The dataset, for messages.

    Returns:
        The path without a suffix.

    Raises:
        ConfigError: If the folder cannot be written, or no example makes a row.
    """
    key = json.dumps([_FORMAT, CHUNK, dataset._fingerprint, encoding.identity])
    path = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:32]
    with _locked(path):
        if _is_usable(path, encoding):
            _say_once(f"Using the cached rows of {where}: {path}.npy")
            return path
        for left in cache_dir.glob(f".{path.name}-*"):  # of a process that was killed
            left.unlink()
        _write(dataset, encoding, path, where)
    return path


def skipped(stats: Stats) -> list[str]:
    """Return what was left out of the examples, for messages."""
    found = [
        f"{count:,} skipped: {reason}, the first {place.shown(None)}"
        for reason, (count, place) in stats.skipped.items()
    ]
    if stats.tokens_dropped:
        found.append(
            f"{stats.tokens_dropped:,} tokens at the ends of documents dropped: too few for a row "
            f"(min_sequence_length)"
        )
    return found


def report(stats: Stats, where: str) -> None:
    """Log what was made of a dataset, with a warning for what was left out."""
    kept = stats.documents - stats.documents_skipped
    log.info("%s: made %d rows of %d examples", where, stats.rows, kept)
    for reason in skipped(stats):
        advice = next((f". {text}" for part, text in _ADVICE.items() if part in reason), "")
        log.warning("%s: %s%s", where, reason, advice)
    if stats.documents_truncated:
        lost = f"; {stats.answers_cut:,} of them have an answer without its end"
        log.warning(
            "%s: %s examples cut to max_sequence_length%s",
            where,
            f"{stats.documents_truncated:,}",
            lost if stats.answers_cut else "",
        )


def _write(dataset: Any, encoding: Encoding, path: Path, where: str) -> None:
    log.info("Tokenizing %s (%d rows) into %s.npy", where, len(dataset), path)
    stats, sizes = Stats(), []
    dtype = _dtype_of(encoding)

    def parts() -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(dataset), CHUNK):
            stop = min(start + CHUNK, len(dataset))
            examples = _read(dataset, start, stop, where)
            rows = encoding.rows(examples, start, stats)
            used = _used(rows, encoding.fill)
            sizes.append(used * rows.shape[1])
            yield np.concatenate(
                [
                    np.empty(0, dtype),
                    *(
                        row[:, :size].ravel()
                        for row, size in zip(rows.astype(dtype), used.tolist(), strict=True)
                    ),
                ]
            )

    write_tokens(_values_of(path), parts(), dtype)
    if not stats.rows:
        reasons = "; ".join(skipped(stats)) or "there are none"
        raise ConfigError(
            f"{OWNER}.path: no row of {where!r} can be used ({reasons}). Change the arguments, or "
            f"the data."
        )
    ends = np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes]), dtype=np.int64)
    write_tokens(_ends_of(path), iter([ends]), ends.dtype)
    _facts_of(path).write_text(json.dumps({"rows": stats.rows, "documents": stats.documents}))
    report(stats, where)


def _read(dataset: Any, start: int, stop: int, where: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = dataset.select(range(start, stop)).to_list()
    except Exception as error:  # the library raises any
        raise ConfigError(unreadable(f"{where}, rows {start} to {stop - 1}", error)) from error
    return found


def _used(rows: npt.NDArray[np.int32], fill: tuple[int, ...]) -> Ints:
    """Return the positions of each row up to the last one that is not filled.

    Shapes:
        rows: (N, F, S). Returns: (N,).
    """
    is_used = (rows != np.array(fill, np.int32)[:, None]).any(axis=1)
    length = rows.shape[2]
    found: Ints = np.where(is_used.any(axis=1), length - is_used[:, ::-1].argmax(axis=1), 0)
    return found


def _is_usable(path: Path, encoding: Encoding) -> bool:
    if not _facts_of(path).is_file():
        return False
    for file, dtype in (
        (_values_of(path), _dtype_of(encoding)),
        (_ends_of(path), np.dtype(np.int64)),
    ):
        damage = damage_of(file, dtype)
        if damage is not None:
            log.warning("The file of cached rows %s is damaged (%s); rebuilding it", file, damage)
            return False
    return True


def _dtype_of(encoding: Encoding) -> np.dtype[Any]:
    return np.dtype(np.uint16 if encoding.largest < 2**16 else np.int32)


def _values_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.npy")


def _ends_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-ends.npy")


def _facts_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager: no other process of this machine writes these rows."""
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{OWNER}.cache_dir: {str(path.parent)!r} cannot be written "
            f"({folder_reason(path.parent, error)}). Set cache_dir to a writable folder."
        ) from error
    with file:  # closing it unlocks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Waiting for another process, which makes the rows %s.npy", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        log.info(text)
