"""Batches of one of several processes, and what each knows of the others' parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.data.batches import batch_size_of, split_batch
from modelzoo_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """What a process knows of a batch that all share, equal on all but for `is_filler`.

    Args:
        sizes: How many samples each process has.
        is_filler: Whether this process has none, and its batch stands for nothing.
    """

    sizes: tuple[int, ...]
    is_filler: bool

    @property
    def is_even(self) -> bool:
        """Whether all processes have the same number of samples."""
        return min(self.sizes) == max(self.sizes)


class Shared(NamedTuple):
    """A batch of this process; the facts are no tuple, so that nothing moves them to a device."""

    batch: Batch
    facts: ShareFacts


SharedItems = Iterator[tuple[Shared, bool, int]]


def size_of(batch: Batch) -> int:
    """Return the number of samples of a batch; one of which it is not known counts as one."""
    try:
        return batch_size_of(batch)
    except ConfigError:
        return 1


def parts_of(shared: Shared, size: int) -> list[Shared]:
    """Return a batch in parts of at most `size` samples: as many on every process.

    A process whose samples do not suffice gets one of them again, as a filler.

    Args:
        shared: The batch.
        size: Samples of a part, > 0.

    Raises:
        ConfigError: If the tensors do not have as many samples as one another.
    """
    batch, facts = shared
    num = max(1, -(-max(facts.sizes) // size))
    own = [] if facts.is_filler else split_batch(batch, size)
    filler = split_batch(batch, 1)[0] if len(own) < num else None
    parts = []
    for number in range(num):
        sizes = tuple(min(max(each - number * size, 0), size) for each in facts.sizes)
        is_filler = number >= len(own)
        parts.append(Shared(filler if is_filler else own[number], ShareFacts(sizes, is_filler)))
    return parts
