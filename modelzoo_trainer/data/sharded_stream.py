"""A stream of samples that all processes read alike, and of which each trains on its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class ShardedStream(IterableDataset[Any]):
    """A stream that the trainer divides among the processes and the workers of a loader.

    Every process and every worker reads the same samples in the same order; each batch of all
    processes is made of the samples that come next, and each process takes its part of them. So
    every sample is trained on once, in an order that does not depend on the number of processes or
    workers, and a run may resume with another number of either in the middle of an epoch.

    Without it each process has a stream of its own, which must shard itself.

    Args:
        samples: An IterableDataset, or another iterable that can be iterated again. It must not
            shard itself, and its order must not depend on global generators if another number of
            processes is to have the same. If it has `set_epoch(epoch)`, that is called before each
            epoch; if it has `iter_from(index)`, that is called in place of `iter` to begin after
            `index` samples, which are read and dropped otherwise.

    Cost:
        Each process and each worker reads all samples, and drops those of others. Where reading one
        is expensive, use a data set with `__getitem__`.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples
        if hasattr(samples, "set_epoch"):
            self.set_epoch = samples.set_epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:  # or the trainer divides it
            return iter(self.samples)
        return islice(iter(self.samples), info.id, None, info.num_workers)
