"""Where in the training data a run is, and the random numbers that belong there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modelzoo_trainer.core.backend import Backend, Stream
from modelzoo_trainer.data.generators import mixed


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches, or between two parts of one.

    Args:
        epoch: Whole passes before this one.
        batch_idx: Batches of the pass consumed.
        num_batches: Forward passes since the start.
        parts: Parts of the batch that comes next consumed.
        loader: The loader's own state there, if it has one.
    """

    epoch: int = 0
    batch_idx: int = 0
    num_batches: int = 0
    parts: int = 0
    loader: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return it as a part of a checkpoint."""
        return {
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "num_batches": self.num_batches,
            "parts": self.parts,
            "loader": self.loader,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Return what `state` described; checkpoints of the first format lack parts and loader."""
        return cls(
            epoch=state["epoch"],
            batch_idx=state["batch_idx"],
            num_batches=state["num_batches"],
            parts=state.get("parts", 0),
            loader=state.get("loader"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeeds:
    """What decides the random numbers of a pass.

    Args:
        order: Of the order; equal on all processes.
        samples: Of what is drawn while a sample is loaded; equal on all processes.
        fetches: Of what is drawn while a batch is fetched, and afterwards; of this process.
    """

    order: int
    samples: int
    fetches: int

    @classmethod
    def of(cls, backend: Backend, epoch: int) -> PassSeeds:
        """Return those of a pass; the generators are left as they are."""
        return cls(
            order=_seed(backend, epoch, Stream.EPOCH),
            samples=_seed(backend, epoch, Stream.SAMPLE),
            fetches=mixed(_seed(backend, epoch, Stream.FETCH), backend.data_shard[0]),
        )


def _seed(backend: Backend, epoch: int, stream: Stream) -> int:
    before = torch.get_rng_state()
    backend.seed_host(epoch, stream)
    seed = torch.initial_seed()
    torch.set_rng_state(before)
    return seed


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader, its samplers and its data set, of those that have it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    told: list[Any] = []
    for owner in owners:
        if hasattr(owner, "set_epoch") and not any(owner is other for other in told):
            owner.set_epoch(epoch)
            told.append(owner)
