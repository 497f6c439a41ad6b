"""What a run remembers of its training data, to see whether a resumed one has the same."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.epochs import known_length
from modelzoo_trainer.loading.position import Position

log = logging.getLogger("modelzoo_trainer.data")

_WORDS: Final = {
    "num_samples": "{} samples",
    "batch_size": "batches of {}",
    "num_batches": "{} batches an epoch",
}


def facts_of(
    loader: Iterable[Batch], num_batches: int | None, draws_per_batch: int = 1
) -> dict[str, int]:
    """Return the sizes of the data, as far as the loader tells them.

    `num_batches` are an epoch's of all processes together, `draws_per_batch` the loader's for each.
    """
    size = size_of_draws(loader)
    facts = {
        "num_samples": known_length(getattr(loader, "dataset", None)),
        "batch_size": None if size is None else size * draws_per_batch,
        "num_batches": num_batches,
    }
    return {name: value for name, value in facts.items() if type(value) is int}


def size_of_draws(loader: Iterable[Batch]) -> int | None:
    """Return how many samples the loader draws at once, as far as it tells."""
    size = getattr(loader, "batch_size", None)
    return size if type(size) is int else None


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Warn if the data is not what it was when the checkpoint was made."""
    changed = [name for name in _WORDS if name in before and name in now]
    changed = [name for name in changed if before[name] != now[name]]
    if changed:
        log.warning(
            "Exactness is not guaranteed: the training data has changed. train_dataloader has %s; "
            "when the checkpoint was made it had %s.",
            ", ".join(_WORDS[name].format(now[name]) for name in changed),
            ", ".join(_WORDS[name].format(before[name]) for name in changed),
        )


def warn_of_other_workers(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Warn if batches were loaded in this process when the checkpoint was made, or are now.

    The samples are the same, but loading them seeds the generators of the process that does it.
    """
    was, num = before.get("num_workers"), now.get("num_workers")
    if was is not None and num is not None and (was == 0) != (num == 0):
        log.warning(
            "Exactness is not guaranteed: num_workers was %d when the checkpoint was made, and is "
            "%d. The samples are the same, but what callbacks or the model draw from random, "
            "numpy.random or torch in this process will differ.",
            was,
            num,
        )


def warn_of_new_layout(
    before: Position,
    now: Position,
    skipped: Collection[Any],
    *,
    loses_state: bool,
    divides_itself: bool,
) -> None:
    """Log what it means that a run resumes with another number of processes.

    `skipped` are the batches that the checkpoint has as not to be trained on; `loses_state` says
    whether loaders had left their own states in it, `divides_itself` whether each process's loader
    yields another part of the data.
    """
    was, num = before.layout.num_shards, now.layout.num_shards
    log.info(
        "The data was divided into %d parts when the checkpoint was made, and now into %d: epoch "
        "%d continues with batch %d.",
        was,
        num,
        now.epoch,
        now.batch_idx,
    )
    num_again = (before.num_samples or 0) - (now.num_samples or 0)
    if before.num_samples and now.num_samples is not None and num_again:
        log.warning(
            "Exactness is not guaranteed: with batches of another size, %d samples of epoch %d are "
            "trained on again.",
            num_again,
            now.epoch,
        )
    if skipped:
        log.warning(
            "The checkpoint was made with %d parts of the data, and this run has %d: the %d "
            "batches that were to be skipped are trained on, as their numbers mean others now.",
            was,
            num,
            len(skipped),
        )
    if loses_state:
        log.warning(
            "Exactness is not guaranteed: train_dataloader left a state for each of %d parts of "
            "the data, and this run has %d. It begins without a state.",
            was,
            num,
        )
    elif divides_itself and now.batch_idx:
        log.warning(
            "Exactness is not guaranteed: train_dataloader divides the data itself, into %d parts "
            "when the checkpoint was made and now into %d. Some samples of epoch %d are trained on "
            "again, and others skipped. Wrap a stream in ShardedStream, which the trainer divides.",
            was,
            num,
            now.epoch,
        )


def check_position(num: int, length: int | None, limit: int | None, limited_by: str) -> None:
    """Check that an epoch can begin after `num` batches.

    `limit` is the number after which it ends though it may have more, `limited_by` the setting.

    Raises:
        ConfigError: If the epoch would be over.
    """
    if limit is not None and limit <= num:
        raise ConfigError(
            f"the checkpoint was made after batch {num} of an epoch, but {limited_by} "
            f"ends an epoch after {limit}. Use the one that it was made with, or a larger one."
        )
    if length is not None and 0 < length <= num:
        raise ConfigError(
            f"the checkpoint was made after batch {num} of an epoch, but train_dataloader has "
            f"{length}. Use the data and batch size that it was made with."
        )
