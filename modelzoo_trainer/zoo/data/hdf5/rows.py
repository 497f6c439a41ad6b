"""Batches of token rows from HDF5 files."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.hdf5.files import FolderState, RowFiles
from modelzoo_trainer.zoo.data.hdf5.open_files import OpenFiles
from modelzoo_trainer.zoo.data.hdf5.selection import SampleRange
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature, of_windows, to_send
from modelzoo_trainer.zoo.data.hdf5.transforms import BatchTransform
from modelzoo_trainer.zoo.rows.hdf5_format import (
    FEATURES,
    IGNORED_LABEL,
    INPUTS,
    KEY_PADDING,
    LABELS,
    LOSS_MASK,
    MASK,
    MASKED_WEIGHTS,
    MODALITY,
    POSITIONS,
    SEGMENTS,
    SPAN,
)

_INT32: Final = np.iinfo(np.int32)
_NUM_PROBED: Final = 64

Ints = NDArray[np.int64]


class Segments(NamedTuple):
    """Where samples lie: sample i of segment s is at `firsts[s] + (i - starts[s]) * step`.

    Args:
        starts: Number of samples before each segment.
        firsts: Position of its first sample: a row, or a token, of all files.
        step: Positions from a sample to the next.
        num_samples: Samples of all segments.
    """

    starts: Ints
    firsts: Ints
    step: int
    num_samples: int

    @classmethod
    def of(cls, runs: Sequence[tuple[int, SampleRange]], step: int) -> Segments:
        """Return segments from (position of the source's first sample, run of samples)."""
        counts = [run.stop - run.start for _, run in runs]
        ends = np.cumsum(counts, dtype=np.int64)
        firsts = np.array([base + run.start * step for base, run in runs], dtype=np.int64)
        return cls(ends - counts, firsts, step, int(ends[-1]))

    def positions(self, samples: Ints) -> Ints:
        """Return the positions of samples."""
        numbers = np.searchsorted(self.starts, samples, side="right") - 1
        found: Ints = self.firsts[numbers] + (samples - self.starts[numbers]) * self.step
        return found


class HDF5Rows(BatchDataset):
    """A dataset of token rows in files; index -1 is a padding row, which counts nothing.

    Args:
        files: All files.
        segments: Which of their rows are the samples.
        features: Names of the rows of a batch.
        transforms: Applied to each batch.
        seed: Of the transforms.

    Shapes:
        A batch: each feature (B, S), int32.
    """

    def __init__(
        self,
        files: RowFiles,
        segments: Segments,
        *,
        features: Sequence[str] = FEATURES,
        transforms: Sequence[BatchTransform] = (),
        seed: int = 0,
    ) -> None:
        self.files = files
        self.segments = segments
        self.features = tuple(features)
        self.transforms = tuple(transforms)
        self.states: Sequence[FolderState] = ()
        """The folders, checked for changes in each epoch."""
        self.fingerprint = 0
        """A number that changes with the files."""
        self._seed = seed
        self._epoch = 0
        self._open = OpenFiles()
        self._vocab_size: int | None = None
        self._num_positions: int | None = None
        self.num_segments: int | None = None
        """Number of segments of the model; None = any."""

    def __len__(self) -> int:
        return self.segments.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return one sample, without a batch dimension.

        Raises:
            IndexError: If there is no sample of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        batch = self.__getitems__([index % len(self)])
        return {key: _first(rows) for key, rows in batch.items()}

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples.

        Raises:
            ConfigError: With file, dataset and row, if one cannot be read, or has a token id that
                the model lacks.
        """
        samples = np.asarray(indices, dtype=np.int64)
        if len(samples) and samples.min() >= 0:
            places = self.segments.positions(samples)
            return self._transformed(self._batch(places, slice(None), len(samples)), samples)
        (real,) = np.nonzero(samples >= 0)
        places = self.segments.positions(samples[real])
        return self._transformed(self._batch(places, real, len(samples)), samples)

    def raw(self, indices: list[int]) -> NDArray[np.int32]:
        """Return samples as they are in the files: (B, features, S), or (B, S + 1) of a corpus."""
        return self._raw(self.segments.positions(np.asarray(indices, dtype=np.int64)))

    @abstractmethod
    def _raw(self, places: Ints) -> NDArray[np.int32]:
        """Return the samples at some places."""

    @abstractmethod
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        """Return a batch of `size` rows, those at `rows` read from the files, the others 0."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sample in the files."""

    def _transformed(self, batch: Batch, samples: Ints) -> Batch:
        for transform in self.transforms:
            batch = transform(batch, samples, (self._seed, self._epoch))
        return batch

    # ---- checks

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and check that the folders are unchanged.

        Raises:
            ConfigError: With the file that has changed.
        """
        self._epoch = epoch
        for state in self.states:
            state.check()

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check that samples fit a model, now on 64 of them, then on each that is read.

        Args:
            vocab_size: Number of token ids of the model; None = any.
            max_position_embeddings: Longest sequence of the model; None = any.

        Raises:
            ConfigError: If samples are longer, or one has a token id that the model lacks.
        """
        if max_position_embeddings is not None:
            self._check_length(max_position_embeddings)
        self._vocab_size, self._num_positions = vocab_size, max_position_embeddings
        if vocab_size is not None:
            for transform in self.transforms:
                transform.check_vocabulary(vocab_size)
            num = min(_NUM_PROBED, len(self))
            probed = np.linspace(0, len(self) - 1, num, dtype=np.int64)
            self._probe(self.segments.positions(probed))

    def _probe(self, places: Ints) -> None:
        """Check the rows at some places."""
        self._batch(places, slice(None), len(places))

    def _check_length(self, longest: int) -> None:
        length = num_positions = self.length
        for transform in self.transforms:
            num_positions = max(num_positions, transform.positions_after(length))
            length = transform.length_after(length)
        length = max(length, num_positions)
        if length > longest:
            added = "" if length == self.length else f" ({self.length} without data_transforms)"
            first = self.files.files[0]
            raise ConfigError(
                f"{first.path}: samples need {length} positions{added}, but the model's "
                f"max_position_embeddings is {longest}. Increase max_position_embeddings, or use "
                f"data of at most {longest} tokens per sample."
            )

    def _as_int32(self, rows: NDArray[Any], places: Ints) -> NDArray[np.int32]:
        """Return raw rows (B, ...) as int32."""
        if not np.can_cast(rows.dtype, np.int32) and rows.size:
            low, high = rows.min(), rows.max()
            if low < _INT32.min or high > _INT32.max:
                wrong = (rows < _INT32.min) | (rows > _INT32.max)
                one = int(np.nonzero(wrong)[0][0])
                raise ConfigError(
                    f"{self.files.place_of(int(places[one]))}: a value does not fit int32 (the "
                    f"file has {rows.dtype}: {low} to {high}). Preprocess the data again."
                )
        return rows.astype(np.int32, copy=False)

    def _check_tokens(self, ids: NDArray[Any], places: Ints, name: str) -> None:
        """Check the token ids (B, S), int32 or unsigned, of rows at these places."""
        if not ids.size:
            return
        highest = _INT32.max if self._vocab_size is None else self._vocab_size - 1
        # One pass: as unsigned numbers, negative ones are larger than all others.
        if (ids if ids.dtype.kind == "u" else ids.view(np.uint32)).max() <= highest:
            return
        wrong = (ids < 0) | (ids > highest)
        if name.endswith(LABELS):
            wrong &= ids != IGNORED_LABEL
        rows, columns = np.nonzero(wrong)
        if not len(rows):
            return
        found = int(ids[rows[0], columns[0]])
        size = "" if self._vocab_size is None else f"; the model's vocab_size is {self._vocab_size}"
        raise ConfigError(
            f"{self.files.place_of(int(places[rows[0]]))}: {name} has token id {found} in column "
            f"{columns[0]}{size}. Increase vocab_size, or use data of the model's tokenizer."
        )

    def _check_positions(self, positions: NDArray[np.int32], places: Ints) -> None:
        """Check the positions (B, S) of rows at these places."""
        highest = _INT32.max if self._num_positions is None else self._num_positions - 1
        unsigned = positions.view(np.uint32)  # as for token ids
        if not positions.size or unsigned.max() <= highest:
            return
        row, column = (int(one[0]) for one in np.nonzero(unsigned > highest))
        size = "" if self._num_positions is None else f" (max_position_embeddings is {highest + 1})"
        raise ConfigError(
            f"{self.files.place_of(int(places[row]))}: {POSITIONS} has {positions[row, column]} in "
            f"column {column}, which the model lacks{size}. Preprocess the data again."
        )

    def _check_segments(self, values: NDArray[np.int32], places: Ints, name: str) -> None:
        """Check the segments (B, S) of rows at these places."""
        highest = _INT32.max if self.num_segments is None else self.num_segments - 1
        unsigned = values.view(np.uint32)  # as for token ids
        if not values.size or unsigned.max() <= highest:
            return
        row, column = (int(one[0]) for one in np.nonzero(unsigned > highest))
        known = "" if self.num_segments is None else f" (num_segments is {self.num_segments})"
        raise ConfigError(
            f"{self.files.place_of(int(places[row]))}: {name} has segment {values[row, column]} in "
            f"column {column}, which the model lacks{known}. Increase num_segments, or create the "
            f"file again."
        )

    def _check_flags(self, values: NDArray[np.int32], places: Ints, name: str) -> None:
        """Check that values (B, S) of rows at these places are 0 or 1."""
        if not values.size or values.view(np.uint32).max() <= 1:  # as for token ids
            return
        row, column = (int(one[0]) for one in np.nonzero((values != 0) & (values != 1)))
        raise ConfigError(
            f"{self.files.place_of(int(places[row]))}: {name} has {values[row, column]} in column "
            f"{column}, expected 0 or 1. Preprocess the data again."
        )

    def _check_counts(self, values: NDArray[np.int32], places: Ints, name: str) -> None:
        """Check that weights or spans (B, S) of rows at these places are not negative."""
        if not values.size or values.view(np.uint32).max() <= _INT32.max:  # as for token ids
            return
        row, column = (int(one[0]) for one in np.nonzero(values < 0))
        raise ConfigError(
            f"{self.files.place_of(int(places[row]))}: {name} has {values[row, column]} in column "
            f"{column}, expected a number >= 0. Preprocess the data again."
        )


class SampleRows(HDF5Rows):
    """Rows of the Sample format: datasets of shape (samples, features, S)."""

    @property
    @override
    def length(self) -> int:
        return self.files.row_shape[-1]

    @override
    def _raw(self, places: Ints) -> NDArray[np.int32]:
        return self._read(places).swapaxes(0, 1)

    @override
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        return to_send(padded(self._read(places), rows, size), by_feature, self.features)

    def _read(self, places: Ints) -> NDArray[np.int32]:
        """Return the rows at some places, (features, B, ..., S)."""
        files = self.files
        num_features, *shape = files.row_shape
        raw = np.empty((num_features, len(places), *shape), files.dtype)
        for target, block in self._blocks(places):
            if len(block) == 1:
                raw[:, target[0]] = block[0]
            else:
                raw[:, target] = block.swapaxes(0, 1)
        if raw.dtype != np.int32:
            by_row = self._as_int32(raw.swapaxes(0, 1), places)
            raw = np.ascontiguousarray(by_row.swapaxes(0, 1))
        flat = raw.reshape(*raw.shape[:2], math.prod(shape))
        for values, name in zip(flat, self.features, strict=False):
            self._check_feature(values, places, name)
        return raw

    def _check_feature(self, values: NDArray[np.int32], places: Ints, name: str) -> None:
        """Check a feature (B, S) of rows at these places."""
        if name.endswith((INPUTS, LABELS)):  # of pairs of answers, too
            self._check_tokens(values, places, name)
        elif name == POSITIONS:
            self._check_positions(values, places)
        elif name.endswith(SEGMENTS):
            self._check_segments(values, places, name)
        elif name in (KEY_PADDING, MODALITY):
            self._check_flags(values, places, name)
        elif name.endswith(MASK) or name in (SPAN, MASKED_WEIGHTS, LOSS_MASK):
            self._check_counts(values, places, name)

    def _blocks(self, places: Ints) -> Iterator[tuple[Ints, NDArray[Any]]]:
        """Yield the rows of each file, in blocks of neighbours, with their numbers in the batch."""
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        numbers, inner = self.files.locate(ordered)
        for begin, end in _runs(ordered, 1):
            while begin < end:  # a run may reach into the next files
                file = self.files.files[numbers[begin]]
                first = int(inner[begin])
                stop = min(end, begin + file.num_rows - first)
                yield order[begin:stop], self._open.read(file, first, first + stop - begin)
                begin = stop


class CorpusRows(HDF5Rows):
    """Windows of the Corpus format: 1-D datasets of tokens, one after the other over all files.

    The last token of a window is the first one of the next.

    Args:
        files: All files.
        segments: Which of their windows are the samples; positions are tokens.
        length: Tokens per sample.
        more: Other arguments of `HDF5Rows`.
    """

    def __init__(self, files: RowFiles, segments: Segments, length: int, **more: Any) -> None:
        super().__init__(files, segments, **more)
        self._length = length

    @property
    @override
    def length(self) -> int:
        return self._length

    @override
    def _raw(self, places: Ints) -> NDArray[np.int32]:
        return self._windows(places).astype(np.int32, copy=False)

    @override
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        windows = self._windows(places)
        if size == len(places):
            return to_send(windows, of_windows, FEATURES)
        out = np.zeros((3, size, self._length), np.int32)
        out[0, rows], out[1, rows], out[2, rows] = windows[:, :-1], 1, windows[:, 1:]
        return to_send(out, by_feature, FEATURES)

    def _windows(self, places: Ints) -> NDArray[Any]:
        """Return the tokens at some places, (B, S + 1): int32, uint8 or uint16."""
        length, files = self._length, self.files.files
        raw = np.empty((len(places), length + 1), self.files.dtype)
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        numbers, inner = (one.tolist() for one in self.files.locate(ordered))
        for begin, end in _runs(ordered, length):
            file, first = files[numbers[begin]], inner[begin]
            num = (end - begin) * length + 1
            if first + num <= file.num_rows:
                tokens = self._open.read(file, first, first + num)
            else:
                tokens = self._tokens(int(ordered[begin]), int(ordered[begin]) + num)
            if end - begin == 1:
                raw[order[begin]] = tokens
            else:
                raw[order[begin:end], :-1] = tokens[:-1].reshape(-1, length)
                raw[order[begin:end], -1] = tokens[length::length]
        is_small = raw.dtype in (np.uint8, np.uint16)  # and stays so: less to send
        windows = raw if is_small else self._as_int32(raw, places)
        self._check_tokens(windows, places, "the corpus")
        return windows

    def _tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens [start, stop) of all files."""
        parts = []
        (number,), (inner,) = self.files.locate(np.array([start]))
        while start < stop:
            file = self.files.files[number]
            num = min(stop - start, file.num_rows - int(inner))
            if num:
                parts.append(self._open.read(file, int(inner), int(inner) + num))
            start, number, inner = start + num, number + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class MappedRows(BatchDataset):
    """Samples that a function makes of raw rows; they are collated by torch's `default_collate`.

    The function may draw random numbers: they are seeded for each batch.

    Args:
        rows: The rows, of either format.
        function: Gets an int32 array: a row of a file, or the S + 1 tokens of a window.
    """

    draws_numbers: ClassVar[bool] = True

    def __init__(self, rows: HDF5Rows, function: Callable[[Any], Any]) -> None:
        self.rows = rows
        self.function = function

    @property
    def fingerprint(self) -> int:
        """A number that changes with the files."""
        return self.rows.fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and check that the folders are unchanged."""
        self.rows.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.function(self.rows.raw([index])[0])

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        return default_collate([self.function(row) for row in self.rows.raw(indices)])


def padded(read: NDArray[np.int32], rows: Any, size: int) -> NDArray[np.int32]:
    """Return a batch (features, size, ...) with those rows as read, and the others 0."""
    if read.shape[1] == size:
        return read
    out = np.zeros((len(read), size, *read.shape[2:]), np.int32)
    out[:, rows] = read
    return out


def _runs(places: Ints, step: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of sorted places that are one after the other."""
    breaks = np.flatnonzero(np.diff(places) != step) + 1
    begin = 0
    for end in [*breaks.tolist(), len(places)]:
        if end > begin:
            yield begin, end
        begin = end


def _first(rows: Any) -> Any:
    """Return the first sample of a part of a batch."""
    return {key: _first(one) for key, one in rows.items()} if isinstance(rows, dict) else rows[0]
