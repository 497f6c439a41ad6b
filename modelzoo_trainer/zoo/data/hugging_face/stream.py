"""Rows of tokens from a dataset that is read as a stream, with a state to resume from.

Dimension letters: F features, S positions, B batch.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from backends.tokenizer_threads import hold_tokenizers_to_one_thread
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, to_send
from modelzoo_trainer.zoo.data.hugging_face.encoding import CHUNK, Encoding
from modelzoo_trainer.zoo.data.hugging_face.row_cache import report, skipped
from modelzoo_trainer.zoo.data.hugging_face.source import OWNER, unreadable
from modelzoo_trainer.zoo.data.processor import LoadingOptions
from modelzoo_trainer.zoo.rows.interface import Stats


class _Position(NamedTuple):
    """The place of a row in the stream."""

    state: Any
    """State of the dataset before the documents that are tokenized together with it."""
    chunk: int
    """How many such groups are before them."""
    row: int
    """Its number among the rows made of them."""


class RowStream(IterableDataset[Batch]):
    """Batches of rows, which are made as they are needed.

    Documents are read, tokenized, packed and shuffled in groups of 1,024. The state is the
    dataset's before a group, and the number of its rows that were used.

    Args:
        dataset: A `datasets.IterableDataset`.
        encoding: Makes the rows.
        options: Batch size, order, and whether a smaller last batch is dropped.
        check: Compares the encoding with a model.
        where: The dataset, for messages.
        source: Identifier of the data.

    Attributes:
        fingerprint: Differs between streams with other rows, or another order.

    Shapes:
        A batch: what `encoding.batch` makes of (F, B, S).
    """

    def __init__(
        self,
        dataset: Any,
        encoding: Encoding,
        options: LoadingOptions,
        check: Callable[[int | None, int | None], None],
        where: str,
        source: str,
    ) -> None:
        order = [options.shuffle_seed, options.reshuffle] if options.shuffle else None
        decides = [CHUNK, source, encoding.identity, order]
        self.fingerprint = zlib.crc32(json.dumps(decides).encode())
        self._dataset = dataset
        self._encoding = encoding
        self._options = options
        self._check = check
        self._where = where
        self._shard = (0, 1)
        self._size = options.num_drawn
        self._epoch = 0
        self._start: _Position | None = None
        self._next: _Position | None = None
        self._has_reported = False

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, which the order depends on."""
        self._epoch = epoch

    def take_shard(self, index: int, count: int) -> None:
        """Read the part of one of `count` processes.

        Raises:
            ConfigError: If `global_batch_size` cannot be divided.
        """
        self._shard = (index, count)
        self._size = self._options.num_drawn
        if self._options.global_batch_size is not None:
            if self._size % count:
                raise ConfigError(
                    f"{OWNER}.global_batch_size: {self._size} is not divisible by {count} "
                    f"processes. Use a multiple of {count}."
                )
            self._size //= count

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check that the rows fit a model.

        Raises:
            ConfigError: If they do not.
        """
        self._check(vocab_size, max_position_embeddings)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next row; after the last batch, in a new epoch."""
        return {"next": None if self._next is None else tuple(self._next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at a place."""
        found = state["next"]
        self._start = self._next = None if found is None else _Position(*found)

    @override
    def __iter__(self) -> Iterator[Batch]:
        start, self._start = self._start, None
        return self._batches(start)

    def _batches(self, start: _Position | None) -> Iterator[Batch]:
        size, drops = self._size, self._options.drop_last
        rows = self._rows(start)
        waiting: deque[tuple[npt.NDArray[np.int32], _Position]] = deque()
        while True:
            # One batch ahead, to know which one is the last.
            waiting.extend(islice(rows, 2 * size - len(waiting)))
            if not waiting or (drops and len(waiting) < size):
                return
            taken = [waiting.popleft()[0] for _ in range(min(size, len(waiting)))]
            is_last = not waiting or (drops and len(waiting) < size)
            self._next = None if is_last else waiting[0][1]
            yield self._batch(taken)

    def _batch(self, rows: Sequence[Any]) -> Batch:
        encoding = self._encoding
        return to_send(np.stack(rows, axis=1), encoding.batch, encoding.features)

    def _rows(self, start: _Position | None) -> Iterator[tuple[npt.NDArray[np.int32], _Position]]:
        """Yield rows (F, S), each with its place."""
        if get_worker_info() is not None:
            hold_tokenizers_to_one_thread()
        state, chunk, skip = (None, 0, 0) if start is None else start
        data, stats = self._own_part(), Stats()
        if state is not None:
            data.load_state_dict(state)
        examples = iter(data)
        while group := self._read(examples):
            rows = self._encoding.rows(group, chunk * CHUNK, stats)
            if chunk == 0 and len(group) == CHUNK and not self._has_reported:
                report(stats, f"{self._where}, the first {CHUNK:,} examples")
            if self._options.shuffle:
                rows = rows[self._order(len(rows), chunk)]
            for number in range(skip, len(rows)):
                yield rows[number], _Position(state, chunk, number)
            state, chunk, skip = data.state_dict(), chunk + 1, 0
        if start is None:
            self._report(stats)

    def _own_part(self) -> Any:
        data = copy.deepcopy(self._dataset)  # its state ends with this epoch
        index, count = self._shard
        if count == 1:
            return data
        split: Any = import_module("datasets.distributed").split_dataset_by_node
        return split(data, rank=index, world_size=count)

    def _read(self, examples: Iterator[Any]) -> list[Any]:
        try:
            return list(islice(examples, CHUNK))
        except Exception as error:  # the library raises any
            raise ConfigError(unreadable(self._where, error)) from error

    def _order(self, num: int, chunk: int) -> npt.NDArray[np.int64]:
        options = self._options
        epoch = self._epoch if options.reshuffle else 0
        seed = mixed_seed(options.shuffle_seed, epoch, chunk)
        return np.random.default_rng(seed).permutation(num)

    def _report(self, stats: Stats) -> None:
        is_whole = self._shard[1] == 1 and get_worker_info() is None
        if not stats.rows and is_whole:
            reasons = "; ".join(skipped(stats)) or "there are none"
            raise ConfigError(
                f"{OWNER}.path: no row of {self._where!r} can be used ({reasons}). Change the "
                f"arguments, or the data."
            )
        if not self._has_reported:
            self._has_reported = True
            report(stats, self._where)
