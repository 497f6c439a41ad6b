"""Where in the training data a run is, and the random numbers that belong there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.devices import Backend, Stream, step_seed
from modelzoo_trainer.loading.batch_seeds import mixed

LoaderState = dict[str, Any]
"""What a checkpoint has of a loader besides the position, each part only where it is needed.

* `sampler`: what samplers of the user's had in their attributes when the epoch began, and `order`,
  a checksum of the indices drawn since (`num_draws`, `checksum`);
* `attributes`: likewise of another loader, or of a stream;
* `batches`: a checksum of the last batch consumed (`num`, `checksum`), if batches have to be loaded
  again to get to the position;
* `rounds`: the states of the data set in each worker after `batch_idx` batches (`states`), and
  whether the epoch was over then though the data set was not at its end (`is_cut`);
* `state`: what the loader's own `state_dict` returned after `batch_idx` batches, and `is_cut`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How the batches of an epoch count what its loader draws.

    Batch k is made of the draws `first + k * per_batch` and following.

    Args:
        num_shards: Parts into which the data is divided: 1 without other processes.
        per_batch: Draws that make a batch of all processes.
        size: Samples of a draw; None = not known.
        first: Draws before batch 0, less than `per_batch`: not 0 in an epoch that was begun with
            another number of processes.
    """

    num_shards: int = 1
    per_batch: int = 1
    size: int | None = None
    first: int = 0

    def is_like(self, other: ShardLayout) -> bool:
        """Return whether batches of equal numbers are the same, for all processes."""
        mine, others = (self.num_shards, self.per_batch), (other.num_shards, other.per_batch)
        return mine == others


class Position(NamedTuple):
    """A position between two batches, or between two micro-batches of one.

    Args:
        epoch: Whole epochs before this one.
        batch_idx: Batches of the epoch consumed.
        num_batches: Forward passes since the start.
        parts: Micro-batches of the next batch consumed.
        loader: The loader's own state there, if it has one.
        layout: What the number of a batch means.
    """

    epoch: int = 0
    batch_idx: int = 0
    num_batches: int = 0
    parts: int = 0
    loader: LoaderState | None = None
    layout: ShardLayout = ShardLayout()

    @property
    def offset(self) -> int:
        """Draws of the epoch consumed, by all processes."""
        return self.layout.first + self.batch_idx * self.layout.per_batch

    @property
    def num_samples(self) -> int | None:
        """Samples of the epoch consumed, by all processes; None = not known."""
        return None if self.layout.size is None else self.offset * self.layout.size

    def state(self, index: int) -> dict[str, Any]:
        """Return it as a part of a checkpoint; `index` is the part of the data read here."""
        layout = self.layout
        return {
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "num_batches": self.num_batches,
            "parts": self.parts,
            _key_of_loader(layout.num_shards, index): self.loader,
            "offset": self.offset,
            "num_shards": layout.num_shards,
            "per_batch": layout.per_batch,
            "draw_size": layout.size,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], index: int) -> Position:
        """Return what `state` described; older checkpoints lack a part of it."""
        num_shards = whole_number(state, "num_shards", 1)
        per_batch = whole_number(state, "per_batch", 1)
        batch_idx = whole_number(state, "batch_idx")
        return cls(
            epoch=whole_number(state, "epoch"),
            batch_idx=batch_idx,
            num_batches=whole_number(state, "num_batches"),
            parts=whole_number(state, "parts", 0),
            loader=state.get(_key_of_loader(num_shards, min(index, num_shards - 1))),
            layout=ShardLayout(
                num_shards=num_shards,
                per_batch=per_batch,
                size=whole_number(state, "draw_size", None),
                first=whole_number(state, "offset", batch_idx * per_batch) - batch_idx * per_batch,
            ),
        )

    def further(self, num: int, end: Callable[[int], int | None]) -> Position:
        """Return the position `num` batches further on, perhaps in a later epoch.

        Args:
            num: Batches to skip; the one in whose middle this is counts as one.
            end: Returns the number of batches of an epoch, given the draws before its batch 0;
                None = not known: the position is in this epoch then.
        """
        epoch, idx, layout, loader = (
            self.epoch,
            self.batch_idx + num,
            self.layout,
            self.loader,
        )
        length = end(layout.first)
        if length and idx >= length:
            epoch, idx, loader = epoch + 1, idx - length, None
            layout = replace(layout, first=0)
            num_epochs, idx = divmod(idx, end(0) or idx + 1)
            epoch += num_epochs
        return self._replace(epoch=epoch, batch_idx=idx, parts=0, loader=loader, layout=layout)

    def in_layout(self, layout: ShardLayout) -> Position:
        """Return the position in batches of another number of processes, between two of them.

        Of the loader's state there is left what all processes have alike: that of its sampler.
        Where the draws have other sizes, as many samples are skipped; what is not a whole draw
        then is trained on again.
        """
        before, offset = self.layout, self.offset
        if before.size and layout.size:
            offset = offset * before.size // layout.size
        batch_idx, first = divmod(offset, layout.per_batch)
        return self._replace(
            batch_idx=batch_idx,
            parts=0,
            loader=_common_to_all(self.loader),
            layout=replace(layout, first=first),
        )


def _key_of_loader(num_shards: int, index: int) -> str:
    """Return the key of a process's own state, which no other process writes."""
    return "loader" if num_shards == 1 else f"loader_{index}"


_COMMON: Final = ("sampler", "order")
_OF_ONE_PROCESS: Final = ("state", "rounds", "attributes")


def _common_to_all(loader: LoaderState | None) -> LoaderState | None:
    return {key: loader[key] for key in _COMMON if key in loader} if loader else None


def has_loader_state(state: Mapping[str, Any]) -> bool:
    """Return whether a process's loader has left a state that another process cannot use."""
    loaders = [state[key] or {} for key in state if key.startswith("loader")]
    return any(loader.get(name) for loader in loaders for name in _OF_ONE_PROCESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeeds:
    """What decides the random numbers of an epoch.

    Args:
        order: Of the order; equal on all processes.
        samples: Of what is drawn while a sample is loaded; equal on all processes.
        fetches: Of what is drawn while a batch is fetched, and afterwards; of this process.
    """

    order: int
    samples: int
    fetches: int

    @classmethod
    def of(cls, backend: Backend, epoch: int) -> EpochSeeds:
        """Return those of an epoch; the generators are left as they are."""
        return cls(
            order=_seed(backend, epoch, Stream.EPOCH),
            samples=_seed(backend, epoch, Stream.SAMPLE),
            fetches=mixed(_seed(backend, epoch, Stream.FETCH), backend.comm.data_shard[0]),
        )

    def of_validation(self) -> EpochSeeds:
        """Return those of a validation: none is a training epoch's."""
        return EpochSeeds(
            order=mixed(self.order, 1),
            samples=mixed(self.samples, 1),
            fetches=mixed(self.fetches, 1),
        )


def _seed(backend: Backend, epoch: int, stream: Stream) -> int:
    return step_seed(backend.seed, epoch, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """Where an epoch begins, and what decides its random numbers.

    Args:
        epoch: The number of the epoch.
        batch_idx: Batches to skip: they were trained on before.
        seeds: Of its random numbers.
        skipped: Numbers of other batches to skip.
        num_before: Batches of earlier epochs to skip as well, where epochs share an iterator.
        restores: Whether the position was loaded; if not, the epoch follows the one before.
        loader_state: What `Source.state` returned for the position; None = nothing.
        offset: Draws to skip, of all processes if they divide the loader's.
        length: Batches of the epoch, as far as the loader says; None = it does not.
        limit: Number of the batch before which the epoch ends; None = none.
        needs_sizes: Whether each process's number of samples must be known exactly.
        needs_state: Whether a checkpoint may be made in the epoch.
    """

    epoch: int
    batch_idx: int
    seeds: EpochSeeds
    skipped: frozenset[int] = frozenset()
    num_before: int = 0
    restores: bool = False
    loader_state: LoaderState | None = None
    offset: int = 0
    length: int | None = None
    limit: int | None = None
    needs_sizes: bool = False
    needs_state: bool = True


def set_epoch_of(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader, its samplers and its data set, of those that have it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    done: list[Any] = []
    for owner in owners:
        if hasattr(owner, "set_epoch") and not any(owner is other for other in done):
            owner.set_epoch(epoch)
            done.append(owner)
