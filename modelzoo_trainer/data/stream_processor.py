"""Data processors whose epochs follow each other in one stream of samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.data.processor import BatchDataset, DataProcessor, already_a_batch
from modelzoo_trainer.data.stream import Member, StreamSampler
from modelzoo_trainer.interceptors import event

log = logging.getLogger("modelzoo_trainer.data")

_SAID: Final[set[str]] = set()
_NO_EFFECT: Final = {
    "buckets": "all samples are padded to one length",
    "num_examples": "it follows from the files",
    "steps": "the loop decides",
    "whole_word_masking": "this processor has no such setting, see mask_whole_word",
    "use_worker_cache": "files are read where they are",
    "vocab_size": "token ids are compared with the vocab_size of the model",
    "repeat": "epochs repeat until the loop ends",
    "use_multiple_workers": "num_workers decides",
    "shuffle_buffer": "shuffle puts all samples of all files into a random order",
    "max_sequence_length": "this processor reads whole samples, as long as they are in the files",
}
"""Arguments of published files that this package does not need, and why."""


class StreamProcessor(DataProcessor):
    """Base class of data processors whose samples come in the order of a `StreamSampler`.

    Besides `options` and `dataset`, whose `__getitems__` returns whole batches, the constructor of
    a subclass sets `members`, the sources of the samples.
    """

    dataset: BatchDataset
    members: Sequence[Member]
    _pads = False

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
            pads=self._pads,
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


def say_once(text: str) -> None:
    """Log a notice, in a process once: a dataloader is created for each validation."""
    if text not in _SAID:
        _SAID.add(text)
        log.info(text)


def say_ignored(owner: str, given: Mapping[str, Any], reason: str = "") -> None:
    """Log once which of the arguments have no effect.

    Args:
        owner: Name of the data processor.
        given: Arguments that are not at their default, by name.
        reason: Why; "" = the general reason of each.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            say_once(f"{owner}.{name} has no effect: {reason or _NO_EFFECT[name]}.")
