"""The order of samples whose epochs follow each other in one stream, as in published processors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.seeded_sampler import mixed_seed

PADDING: Final = -1
"""The index of a padding row: no row of the dataset."""

_CHUNK: Final = 8192  # indices converted to Python objects at a time
_NUM_KEPT: Final = 2  # data epochs in memory
_MOST_INT32: Final = 2**31


@dataclass(frozen=True, slots=True)
class Member:
    """The rows of one source of a mixture, or of the only source.

    Args:
        offset: Index of its first row in the dataset.
        length: Number of rows, > 0.
        share: Samples of it in a data epoch, > 0.
    """

    offset: int
    length: int
    share: int


class StreamSampler(Sampler[int]):
    """Draw from a stream: data epoch 0, then 1, 2, and so on, each of N = sum of the shares.

    The index at a position of the stream only depends on `members`, `shuffle` and `seed`.

    With one member, a data epoch has its first N rows in order, beginning again after the last
    one; shuffled, N of its rows in an order of the epoch: another subset in each epoch if N is
    smaller than the member, every row as often as possible, or once more, if it is larger. With
    several members, each has its share of every data epoch, in places that do not depend on the
    epoch unless shuffled, and continues in the next one where it stopped: member m takes the
    positions from k * share on of its own stream in data epoch k.

    An epoch of training is

    * with `carries`: n = max(1, N // B) batches of `batch_size` B; the rest of a data epoch comes
      first in the next epoch, so that epochs have equal lengths and no sample is lost;
    * without: a data epoch, the last batch smaller, or filled with `PADDING` if `pads`.

    Args:
        members: The sources, at least one.
        batch_size: Samples per batch over all processes, > 0; the loader has `is_global_batch` set.
        shuffle: Whether to shuffle.
        seed: Seed of the order.
        carries: Whether the samples of an incomplete batch begin the next epoch.
        pads: Whether to fill the last batch of an epoch; no effect with `carries`.

    Raises:
        ConfigError: If there is no member, or one has no rows or no share.

    Cost:
        Two data epochs in memory, eight bytes per sample. For a shuffled member of a mixture, also
        a permutation of all of its rows while a data epoch is computed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        carries: bool,
        pads: bool = False,
    ) -> None:
        empty = next((one for one in members if one.length < 1 or one.share < 1), None)
        if not members or empty is not None:
            given = "no member" if empty is None else f"{empty}"
            raise ConfigError(
                f"the sample order got {given}, but requires at least one member, each with one or "
                f"more rows and samples per epoch. Check data_dir, data_subset and num_samples."
            )
        self.members = tuple(members)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.carries = carries
        self.pads = pads and not carries
        self.epoch = 0
        self.num_samples = sum(one.share for one in members)
        """Samples of a data epoch: N."""
        self._kept: dict[int, NDArray[np.int64]] = {}

    @property
    def num_batches(self) -> int:
        """Batches of an epoch of training: n."""
        if self.carries:
            return max(1, self.num_samples // self.batch_size)
        return -(-self.num_samples // self.batch_size)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of the stream in an epoch of training, without padding rows."""
        return self.num_batches * self.batch_size if self.carries else self.num_samples

    def __len__(self) -> int:
        return self.num_batches * self.batch_size if self.pads else self.samples_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._indices(self.order(epoch))

    def _indices(self, order: IndexStream) -> Iterator[int]:
        for start in range(0, len(order), _CHUNK):
            yield from order[start : start + _CHUNK].tolist()

    def order(self, epoch: int) -> IndexStream:
        """Return all indices of an epoch of training, computed as they are sliced."""
        return IndexStream(self, epoch)

    @property
    def checksum(self) -> int:
        """A checksum of what decides the order of the stream; not of the batch size."""
        decides = [astuple(one) for one in self.members], self.shuffle, self.seed
        return zlib.crc32(repr(decides).encode())

    def rows(self, data_epoch: int) -> NDArray[np.int64]:
        """Return the indices of a data epoch: N of them."""
        kept = self._kept
        if data_epoch not in kept:
            while len(kept) >= _NUM_KEPT:
                del kept[next(iter(kept))]
            kept[data_epoch] = self._drawn(data_epoch)
        return kept[data_epoch]

    def _drawn(self, data_epoch: int) -> NDArray[np.int64]:
        if len(self.members) == 1:
            return self._of_one(self.members[0], data_epoch)
        parts = [self._of_member(number, data_epoch) for number in range(len(self.members))]
        drawn = np.concatenate(parts)
        numbers = np.arange(len(self.members), dtype=np.int32)
        labels = np.repeat(numbers, [one.share for one in self.members])
        slots = labels[self._permutation(len(labels), data_epoch if self.shuffle else 0)]
        rows = np.empty_like(drawn)
        rows[np.argsort(slots, kind="stable")] = drawn
        return rows

    def _of_one(self, member: Member, data_epoch: int) -> NDArray[np.int64]:
        length, num = member.length, member.share
        if not self.shuffle:
            return member.offset + np.arange(num, dtype=np.int64) % length
        if num <= length:
            return member.offset + self._permutation(length, data_epoch)[:num].astype(np.int64)
        copies, rest = divmod(num, length)
        again = self._permutation(length, data_epoch, 1)[:rest].astype(np.int64)
        rows = np.concatenate([np.tile(np.arange(length, dtype=np.int64), copies), again])
        shuffled: NDArray[np.int64] = member.offset + rows[self._permutation(num, data_epoch)]
        return shuffled

    def _of_member(self, number: int, data_epoch: int) -> NDArray[np.int64]:
        """Return the samples of a member of a mixture in a data epoch, in order."""
        member = self.members[number]
        start = data_epoch * member.share
        if not self.shuffle:
            places = np.arange(start, start + member.share, dtype=np.int64)
            return member.offset + places % member.length
        parts = []
        end, length = start + member.share, member.length
        for epoch in range(start // length, -(-end // length)):
            first = epoch * length
            part = self._permutation(length, epoch, number + 2)
            parts.append(part[max(start - first, 0) : end - first])
        drawn: NDArray[np.int64] = np.concatenate(parts).astype(np.int64)
        return member.offset + drawn

    def _permutation(self, length: int, *numbers: int) -> NDArray[Any]:
        """Return a permutation of range(length), seeded by the sampler's seed and the numbers."""
        seed = mixed_seed(self.seed, *numbers)
        dtype = torch.int32 if length < _MOST_INT32 else torch.int64
        generator = torch.Generator().manual_seed(seed)
        order: NDArray[np.integer] = torch.randperm(
            length, generator=generator, dtype=dtype
        ).numpy()
        return order


class IndexStream:
    """The indices of an epoch of training of a `StreamSampler`.

    A slice is an array of int64 indices; only the data epochs that it reaches are computed.
    """

    def __init__(self, sampler: StreamSampler, epoch: int) -> None:
        self._sampler = sampler
        self._num_real = sampler.samples_per_epoch
        self._start = epoch * self._num_real
        self._length = len(sampler)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, which: int) -> int: ...

    @overload
    def __getitem__(self, which: slice) -> NDArray[np.int64]: ...

    def __getitem__(self, which: int | slice) -> int | NDArray[np.int64]:
        if isinstance(which, int):
            return int(self[which : which + 1][0])
        begin, end, step = which.indices(self._length)
        if step != 1:
            raise ValueError(f"a batch is a run of the stream; got a slice with step {step}")
        rows = np.full(max(end - begin, 0), PADDING, dtype=np.int64)
        size = self._sampler.num_samples
        at, last = self._start + begin, self._start + min(end, self._num_real)
        filled = 0
        while at < last:
            data_epoch, first = divmod(at, size)
            num = min(size - first, last - at)
            rows[filled : filled + num] = self._sampler.rows(data_epoch)[first : first + num]
            at, filled = at + num, filled + num
        return rows


def stream_sampler(loader: object) -> StreamSampler | None:
    """Return the sampler of a loader if its epochs follow each other in one stream, else None."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = batches.sampler if type(batches) is BatchSampler else None
    return sampler if type(sampler) is StreamSampler else None
