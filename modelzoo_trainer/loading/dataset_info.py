"""Sizes of the training data, saved to detect changes on resume."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from torch.utils.data import Subset

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.epochs import known_length
from modelzoo_trainer.loading.position import Position
from modelzoo_trainer.loading.stream import stream_sampler

log = logging.getLogger("modelzoo_trainer.data")

_WORDS: Final = {
    "num_samples": "{} samples",
    "batch_size": "batches of {}",
    "num_batches": "{} batches per epoch",
    "fingerprint": "data with checksum {:08x}",
    "order": "an order of samples with checksum {:08x}",
}


def facts_of(
    loader: Iterable[Batch], num_batches: int | None, draws_per_batch: int = 1
) -> dict[str, int]:
    """Return the sizes of the data, where the loader has them.

    A dataset whose files may change has an integer `fingerprint` of their names, sizes and rows.

    `num_batches` is per epoch over all ranks, `draws_per_batch` the loader's draws in each.
    """
    size, stream = size_of_draws(loader), stream_sampler(loader)
    dataset = getattr(loader, "dataset", None)
    facts = {
        "num_samples": known_length(dataset),
        "batch_size": None if size is None else size * draws_per_batch,
        "num_batches": num_batches,
        "fingerprint": getattr(dataset, "fingerprint", None),
        "order": None if stream is None else stream.checksum,
    }
    return {name: value for name, value in facts.items() if type(value) is int}


def size_of_draws(loader: Iterable[Batch]) -> int | None:
    """Return the number of samples per draw of the loader, if known."""
    size = getattr(loader, "batch_size", None)
    return size if type(size) is int else None


def check_model(loader: Iterable[Batch], model: Any) -> None:
    """Let the dataset compare its samples with the limits of the model.

    A dataset with a method `check_model(vocab_size, max_position_embeddings)` is called with these
    attributes of the model, None where it has none. It raises a ConfigError if its samples do not
    fit, and may keep the limits to check what it loads later. One with a method
    `follow_model(model)` is first called with the model, whose settings it may take.
    """
    dataset = getattr(loader, "dataset", None)
    while type(dataset) is Subset:
        dataset = dataset.dataset
    follow = getattr(dataset, "follow_model", None)
    if follow is not None:
        follow(model)
    check = getattr(dataset, "check_model", None)
    if check is None:
        return
    limits = (getattr(model, name, None) for name in ("vocab_size", "max_position_embeddings"))
    check(*(limit if type(limit) is int else None for limit in limits))


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Warn if the data has changed since the checkpoint."""
    changed = [name for name in _WORDS if name in before and name in now]
    changed = [name for name in changed if before[name] != now[name]]
    if changed:
        log.warning(
            "The resumed run may differ: the training data has changed. train_dataloader has %s; "
            "at the checkpoint it had %s.",
            ", ".join(_WORDS[name].format(now[name]) for name in changed),
            ", ".join(_WORDS[name].format(before[name]) for name in changed),
        )


def warn_of_other_workers(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Warn if loading moved into or out of this process since the checkpoint.

    The samples are the same, but loading seeds the generators of the loading process.
    """
    was, num = before.get("num_workers"), now.get("num_workers")
    if was is not None and num is not None and (was == 0) != (num == 0):
        log.warning(
            "The resumed run may differ: num_workers was %d at the checkpoint and is now %d. The "
            "samples are the same, but random numbers that callbacks or the model draw in this "
            "process (random, numpy.random, torch) are not. Use the same num_workers to avoid "
            "this.",
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
    """Log the effects of resuming with another number of ranks, or another batch size.

    `skipped`: batches that the checkpoint excludes from training. `loses_state`: whether it has
    states of loaders. `divides_itself`: whether each rank's loader yields its own part of the data.
    """
    was, num = before.layout.num_shards, now.layout.num_shards
    kind, user_words, old, new = "data shards", "processes", was, num
    if was == num:
        kind = user_words = "samples per batch"
        old, new = before.layout.size or 0, now.layout.size or 0
    log.info(
        "The checkpoint was saved with %d %s, this run has %d: epoch %d continues with batch %d.",
        old,
        kind,
        new,
        now.epoch + 1,
        now.batch_idx,
    )
    at, to = before.num_samples, now.num_samples
    if before.in_stream is not None and now.in_stream is not None:
        at, to = before.in_stream, now.in_stream
    num_again = (at or 0) - (to or 0)
    if at and to is not None and num_again:
        log.warning(
            "The resumed run may differ: the batch size has changed, so %d samples of epoch %d "
            "are trained on again. Use the old batch size to avoid this.",
            num_again,
            now.epoch + 1,
        )
    if skipped:
        log.warning(
            "The checkpoint was saved with %d %s, this run has %d, so batch numbers have changed: "
            "the %d batches that the checkpoint excludes will be trained on. Use the same number "
            "of %s to skip them.",
            old,
            kind,
            new,
            len(skipped),
            user_words,
        )
    if loses_state:
        log.warning(
            "The resumed run may differ: the checkpoint has a state of train_dataloader for %d %s, "
            "but this run has %d, so the state is not restored. Use the same number of %s to avoid "
            "this.",
            old,
            kind,
            new,
            user_words,
        )
    elif divides_itself and now.batch_idx:
        log.warning(
            "The resumed run may differ: train_dataloader shards the data itself, into %d shards "
            "at the checkpoint and %d now. Some samples of epoch %d are trained on again and "
            "others skipped. Wrap the stream in ShardedStream, which the trainer shards.",
            was,
            num,
            now.epoch + 1,
        )


def check_limit(num: int, limit: int | None, limited_by: str) -> None:
    """Check that an epoch can start after `num` batches.

    `limit`: number of batches after which the setting `limited_by` ends the epoch.

    Raises:
        ConfigError: If the epoch would already be over.
    """
    if limit is not None and limit <= num:
        raise ConfigError(
            f"The checkpoint was saved after batch {num} of an epoch, but {limited_by} ends an "
            f"epoch after {limit} batches. Set {limited_by} to the value of the original run, or "
            f"a larger one."
        )


def warn_of_shorter_epoch(position: Position, length: int) -> None:
    """Warn that an epoch that is continued has no batch left."""
    log.warning(
        "The resumed run may differ: it continues after batch %d of epoch %d, but train_dataloader "
        "has only %d batches now, so that epoch is over. Use the same data and batch size to avoid "
        "this.",
        position.batch_idx,
        position.epoch + 1,
        length,
    )
