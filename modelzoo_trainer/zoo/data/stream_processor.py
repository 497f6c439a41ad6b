"""Data processors whose epochs follow each other in one stream, as in published ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.base.constraints import (
    Flag,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked_dataclass,
    inert_fields,
    without_effect,
)
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import already_a_batch
from modelzoo_trainer.loading.stream import Member, StreamSampler
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingOptions,
    ShuffleSeed,
)

log = logging.getLogger("modelzoo_trainer.data")

VOCAB_SIZE_IS_COMPARED: Final = "token ids are compared with the vocab_size of the model"
ALL_ARE_SHUFFLED: Final = "shuffle puts all samples of all files into a random order"
"""Reasons why arguments of published files have no effect."""

_SAID: Final[set[str]] = set()


@checked_dataclass(kw_only=True)
class StreamProcessor(DataProcessor):
    """Base class of data processors with the order of a `StreamSampler`.

    The constructor of a subclass sets `options` (`loading_options()`), `dataset`, which returns
    whole batches, `members`, and `pads` to fill the last batch of an epoch with padding rows.

    Args:
        batch_size: Samples per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order; default: 0.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
    """

    batch_size: PositiveInt
    shuffle: Flag = True
    shuffle_seed: ShuffleSeed | None = None
    num_workers: NonNegativeSize = 0
    drop_last: Flag = True
    prefetch_factor: Size | None = 10
    persistent_workers: Flag | None = True
    members: Sequence[Member] = field(init=False)
    pads = False

    def loading_options(self, *, may_shuffle: bool = True) -> LoadingOptions:
        """Return how batches are loaded; `may_shuffle`: whether the samples have no fixed order."""
        return LoadingOptions(
            global_batch_size=self.batch_size,
            shuffle=self.shuffle and may_shuffle,
            shuffle_seed=self.shuffle_seed or 0,
            num_workers=self.num_workers,
            drop_last=self.drop_last,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=bool(self.persistent_workers),
        )

    @event("create-dataloader")
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of batches of all processes; each process takes its slice."""
        options = self.options
        sampler = StreamSampler(
            self.members,
            batch_size=options.num_drawn,
            shuffle=options.shuffle,
            seed=options.shuffle_seed,
            carries=options.drop_last,
            pads=self.pads,
        )
        if options.drop_last:
            self._say_what_is_carried(sampler)
        has_workers = options.num_workers > 0
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_size=options.num_drawn,
            sampler=sampler,
            num_workers=options.num_workers,
            collate_fn=already_a_batch,
            prefetch_factor=options.prefetch_factor if has_workers else None,
            persistent_workers=options.persistent_workers and has_workers,
            generator=torch.Generator().manual_seed(options.shuffle_seed),
        )
        loader.is_global_batch = True  # each process takes a slice
        return loader

    def _say_what_is_carried(self, sampler: StreamSampler) -> None:
        num, size, owner = sampler.num_samples, sampler.batch_size, type(self).__name__
        if num < size:
            say_once(f"{owner}: a batch of {size} samples repeats some of the {num} samples.")
        elif num % size:
            say_once(
                f"{owner}: an epoch is {sampler.num_batches} batches of {size} samples, "
                f"{len(sampler)} of {num}. No sample is lost: each epoch begins where the one "
                f"before it ended."
            )


@checked_dataclass(kw_only=True)
class PrecisionArguments:
    """Arguments of published files that the section `precision` replaces."""

    mixed_precision: Any = without_effect("the section precision decides what a model gets")
    fp16_type: Any = without_effect("the section precision decides what a model gets")


def say_once(text: str, level: int = logging.INFO) -> None:
    """Log a notice, in a process once: a dataloader is created for each validation."""
    if text not in _SAID:
        _SAID.add(text)
        log.log(level, text)


def say_without_effect(processor: DataProcessor) -> None:
    """Log once which arguments are given but have no effect."""
    for one in inert_fields(processor):
        value = getattr(processor, one.name)
        if value != one.default and (value or one.default):
            owner, reason = type(processor).__name__, one.metadata["reason"]
            say_once(f"{owner}.{one.name} has no effect: {reason}.")
