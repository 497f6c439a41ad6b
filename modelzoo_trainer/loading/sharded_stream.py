"""A stream of samples that is divided among processes and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class ShardedStream(IterableDataset[Any]):
    """A stream of samples that the trainer divides among the processes and the workers of a loader.

    Every process and worker reads the same samples in the same order; each batch over all processes
    consists of the next samples, and each process takes its slice. So every sample is trained on
    once, in an order that does not depend on the number of processes or workers, and a run may
    resume mid-epoch with a different number of either.

    Without it, each process has a stream of its own, which must shard itself.

    Args:
        samples: An IterableDataset, or another iterable that can be iterated repeatedly. It must
            not shard itself, and its order must not depend on global generators if a different
            number of processes is to have the same. `set_epoch(epoch)`, if defined, is called
            before each epoch; `iter_from(index)`, if defined, is called instead of `iter` to begin
            after `index` samples, which are otherwise read and dropped.

    Cost:
        Each process and worker reads all samples, and drops the samples of others. If reading a
        sample is expensive, use a dataset with `__getitem__`.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples
        if hasattr(samples, "set_epoch"):
            self.set_epoch = samples.set_epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:  # not in a worker, or the trainer divides it
            return iter(self.samples)
        return islice(iter(self.samples), info.id, None, info.num_workers)
