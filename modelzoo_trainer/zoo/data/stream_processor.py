"""Data processors whose epochs follow each other in one stream, as in published ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import already_a_batch
from modelzoo_trainer.loading.stream import Member, StreamSampler
from modelzoo_trainer.zoo.data.processor import DataProcessor

log = logging.getLogger("modelzoo_trainer.data")

_SAID: Final[set[str]] = set()


class StreamProcessor(DataProcessor):
    """Base class of data processors with the order of a `StreamSampler`.

    Besides `options`, with a global batch size, and `dataset`, which returns whole batches, the
    constructor of a subclass sets `members`, and `pads` to fill the last batch of an epoch with
    padding rows.
    """

    members: Sequence[Member]
    pads: bool = False

    @event("create-dataloader")
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of batches of all processes, of which each takes its slice."""
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


def say_once(text: str, level: int = logging.INFO) -> None:
    """Log a notice, in a process once: a dataloader is created for each validation."""
    if text not in _SAID:
        _SAID.add(text)
        log.log(level, text)


def say_without_effect(owner: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Log once which of the arguments have no effect.

    Args:
        owner: Name of the data processor.
        given: Arguments by name; those that are None or false are at their default.
        reasons: Why each has none.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            say_once(f"{owner}.{name} has no effect: {reasons[name]}.")
