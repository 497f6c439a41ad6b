"""A StopIteration of user code that loads a batch is an error, not the end of an epoch.

torch takes any StopIteration that leaves a fetch for the end of the data: also from a
`__getitem__` or of a collate function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from modelzoo_trainer.errors import not_an_end


class MapFetcher(_MapDatasetFetcher):
    """Fetches from a map-style dataset, which has no end of its own."""

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return a batch."""
        try:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise not_an_end(error, "the dataset or the collate function") from error


class StreamFetcher(_IterableDatasetFetcher):
    """Fetches from an iterable dataset, which ends only in the `__next__` of its iterator."""

    def __init__(self, *arguments: Any) -> None:
        try:
            super().__init__(*arguments)
        except StopIteration as error:
            raise not_an_end(error, "__iter__ of the dataset") from error
        self.collate_fn = EndingNothing(self.collate_fn)


class EndingNothing:
    """A collate function whose StopIteration is an error."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Collate samples."""
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise not_an_end(error, "the collate function") from error


def check_all_here() -> None:
    """Have all loaders of this process, a worker, use these classes."""
    torch_fetch._MapDatasetFetcher = MapFetcher  # type: ignore[misc]
    torch_fetch._IterableDatasetFetcher = StreamFetcher  # type: ignore[misc, assignment]


@contextmanager
def checked(loader: DataLoader[Any]) -> Iterator[None]:
    """Check the fetches of the iterators without workers that a loader creates inside."""
    create = loader._get_iterator

    def created() -> Any:
        iterator: Any = create()
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if type(fetcher) is _MapDatasetFetcher:
            fetcher.__class__ = MapFetcher
        elif type(fetcher) is _IterableDatasetFetcher:
            fetcher.collate_fn = EndingNothing(fetcher.collate_fn)
        return iterator

    vars(loader)["_get_iterator"] = created
    try:
        yield
    finally:
        vars(loader).pop("_get_iterator", None)
