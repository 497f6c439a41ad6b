"""Compare the amount of data of runs with different batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

ABOUT: Final = "\u2248 "
"""Before a number that is not exact."""
_BATCHES: Final = "data.batches_per_epoch"
_PER_BATCH: Final = "data.samples_per_batch"
_SAMPLES: Final = "data.samples_per_epoch"


def with_samples_per_epoch(found: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return settings of runs, with the samples per epoch instead of what follows from them.

    Runs with different batch sizes have different numbers of batches also for the same data. Their
    samples per epoch are shown as different if they cannot be the same: the last batch of an epoch
    may be smaller or dropped.
    """
    plain = [dict(one) for one in found]
    known = [one for one in plain if one]
    sizes = [size for one in known if (size := _sizes(one)) is not None]
    if len(sizes) < len(known) or len({per_batch for _, per_batch in sizes}) < 2:
        return plain
    low = max((batches - 1) * per_batch for batches, per_batch in sizes)
    high = min((batches + 1) * per_batch for batches, per_batch in sizes)
    finest = min(sizes, key=lambda size: size[1])
    is_same_size = _repeats_batch_size(known)
    for one, own in zip(known, sizes, strict=True):
        batches, per_batch = finest if low < high else own
        one.setdefault(_SAMPLES, f"{ABOUT}{batches * per_batch}")
        del one[_BATCHES]
        if is_same_size:
            del one[_PER_BATCH]
    return plain


def _sizes(settings: Mapping[str, str]) -> tuple[int, int] | None:
    """Return batches per epoch and samples per batch; None = not known."""
    try:
        return _whole(settings[_BATCHES]), _whole(settings[_PER_BATCH])
    except (LookupError, ValueError):
        return None


def _whole(text: str) -> int:
    return int("".join(text.split()))


def _repeats_batch_size(known: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a batch size among the settings is the samples per batch of every run."""
    names = [key for key in known[0] if key.rpartition(".")[2] == "batch_size"]
    return any(all(one.get(name) == one[_PER_BATCH] for one in known) for name in names)
