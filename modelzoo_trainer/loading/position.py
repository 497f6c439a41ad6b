"""The position of a run in the training data, and the seeds that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from modelzoo_trainer.base.devices import Backend, Stream, step_seed
from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.loading.batch_seeds import mixed

LoaderState = dict[str, Any]
"""A loader's entries in a checkpoint besides the position, each only where needed.

* `sampler`: state of custom samplers at the start of the epoch, and `order`, a checksum of the
  indices drawn since (`num_draws`, `checksum`);
* `attributes`: likewise for another kind of loader, or for a stream;
* `batches`: a checksum of the last batch consumed (`num`, `checksum`), if batches are reloaded to
  reach the position; a function that returns it, until it is needed;
* `unsaved`: names of attributes that cannot be saved;
* `rounds`: the states of the dataset in each worker after `batch_idx` batches (`states`), and
  whether the epoch ended before the end of the dataset (`is_cut`);
* `state`: the loader's own `state_dict` after `batch_idx` batches, and `is_cut`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How draws of the loader map to batches of an epoch.

    Batch k consists of the draws from `first + k * per_batch` on.

    Args:
        num_shards: Number of data shards; 1 with a single process.
        per_batch: Draws per batch over all ranks.
        size: Samples per draw; None = not known.
        first: Draws before batch 0, less than `per_batch`; not 0 in an epoch that was started with
            another number of ranks.
        samples_per_epoch: Samples of an epoch, if epochs follow each other in one stream
            (`StreamSampler`), so that positions of all epochs can be compared; else None.
    """

    num_shards: int = 1
    per_batch: int = 1
    size: int | None = None
    first: int = 0
    samples_per_epoch: int | None = None

    def is_like(self, other: ShardLayout) -> bool:
        """Return whether equal batch numbers mean the same batch, as far as known."""
        if self.is_stream and other.is_stream and self._of_stream != other._of_stream:
            return False
        if not self.is_same_size(other):
            return False
        mine, others = (self.num_shards, self.per_batch), (other.num_shards, other.per_batch)
        return mine == others

    def is_same_size(self, other: ShardLayout) -> bool:
        """Return whether draws have the same number of samples, as far as known."""
        return self.size == other.size or None in (self.size, other.size)

    @property
    def is_stream(self) -> bool:
        """Whether epochs follow each other in one stream, of draws of a known size."""
        return bool(self.samples_per_epoch and self.size)

    @property
    def _of_stream(self) -> tuple[int | None, int | None]:
        return self.size, self.samples_per_epoch


class Position(NamedTuple):
    """A position between two batches, or between two micro-batches.

    Args:
        epoch: Number of completed epochs.
        batch_idx: Batches of the epoch consumed.
        num_batches: Forward passes since the start.
        parts: Micro-batches of the next batch consumed.
        loader: The loader's own state, if it has one.
        layout: The meaning of batch numbers.
    """

    epoch: int = 0
    batch_idx: int = 0
    num_batches: int = 0
    parts: int = 0
    loader: LoaderState | None = None
    layout: ShardLayout = ShardLayout()

    @property
    def offset(self) -> int:
        """Draws of the epoch consumed on all ranks."""
        return self.layout.first + self.batch_idx * self.layout.per_batch

    @property
    def num_samples(self) -> int | None:
        """Samples of the epoch consumed on all ranks; None = not known."""
        return None if self.layout.size is None else self.offset * self.layout.size

    @property
    def in_stream(self) -> int | None:
        """Samples consumed since the start, if epochs follow each other in one stream."""
        size = self.layout.samples_per_epoch
        num = self.num_samples
        return None if size is None or num is None else self.epoch * size + min(num, size)

    def state(self, index: int) -> dict[str, Any]:
        """Return the checkpoint entry; `index` is the data shard read by this rank."""
        layout = self.layout
        state = {
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "num_batches": self.num_batches,
            "parts": self.parts,
            _key_of_loader(layout.num_shards, index): _computed(self.loader),
            "offset": self.offset,
            "num_shards": layout.num_shards,
            "per_batch": layout.per_batch,
            "draw_size": layout.size,
        }
        if layout.samples_per_epoch is not None:
            state["samples_per_epoch"] = layout.samples_per_epoch
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], index: int) -> Position:
        """Create a position from a checkpoint entry, which older versions left incomplete."""
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
                samples_per_epoch=whole_number(state, "samples_per_epoch", None),
            ),
        )

    def further(self, num: int, end: Callable[[int], int | None]) -> Position:
        """Return the position `num` batches later, perhaps in a later epoch.

        Args:
            num: Batches to skip; a partly consumed one counts.
            end: Returns the number of batches of an epoch, given the draws before its batch 0;
                None = not known, so stay in this epoch.
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
        """Convert the position to another number of ranks or batch size, between two batches.

        Only the loader state common to all ranks, its sampler's, is kept, and with the same
        number of ranks the state at the start of the epoch. If the size of draws has changed, as
        many samples are skipped, rounded down to whole draws; the remaining samples are trained on
        again. In a stream, samples of all epochs count.
        """
        before, offset, epoch = self.layout, self.offset, self.epoch
        if self.in_stream is not None and layout.samples_per_epoch and layout.size:
            epoch, num = divmod(self.in_stream, layout.samples_per_epoch)
            offset = num // layout.size
        elif before.size and layout.size:
            offset = offset * before.size // layout.size
        batch_idx, first = divmod(offset, layout.per_batch)
        return self._replace(
            epoch=epoch,
            batch_idx=batch_idx,
            parts=0,
            loader=self._kept_state(layout),
            layout=replace(layout, first=first),
        )

    def _kept_state(self, layout: ShardLayout) -> LoaderState | None:
        names = {"sampler", "unsaved"}
        if self.layout.is_same_size(layout):
            names.add("order")
        if self.layout.num_shards == layout.num_shards:
            names.add("attributes")
        loader = self.loader or {}
        return {name: state for name, state in loader.items() if name in names} or None


def _key_of_loader(num_shards: int, index: int) -> str:
    """Return the key of a rank's own state, which no other rank writes."""
    return "loader" if num_shards == 1 else f"loader_{index}"


_OF_RANK: Final = ("state", "rounds")
_OF_EPOCH: Final = ("attributes",)


def _computed(loader: LoaderState | None) -> LoaderState | None:
    """Return a loader's state with the checksum that it may have to compute."""
    if loader is None or not callable(loader.get("batches")):
        return loader
    return loader | {"batches": loader["batches"]()}


def has_loader_state(state: Mapping[str, Any], num_shards: int) -> bool:
    """Return whether the checkpoint has loader states that another layout cannot restore.

    `num_shards`: data shards now.
    """
    names = _OF_RANK if whole_number(state, "num_shards", 1) == num_shards else _OF_RANK + _OF_EPOCH
    loaders = [state[key] or {} for key in state if key.startswith("loader")]
    return any(loader.get(name) for loader in loaders for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeeds:
    """The seeds of an epoch.

    Args:
        order: For the sample order; equal on all ranks.
        samples: For loading samples; equal on all ranks.
        fetches: For fetching batches, and for what follows; specific to this rank.
    """

    order: int
    samples: int
    fetches: int

    @classmethod
    def of(cls, backend: Backend, epoch: int) -> EpochSeeds:
        """Return the seeds of an epoch, without changing any generator."""
        return cls(
            order=_seed(backend, epoch, Stream.EPOCH),
            samples=_seed(backend, epoch, Stream.SAMPLE),
            fetches=mixed(_seed(backend, epoch, Stream.FETCH), backend.comm.data_shard[0]),
        )

    def of_validation(self) -> EpochSeeds:
        """Return the seeds of a validation, distinct from the seeds of all training epochs."""
        return EpochSeeds(
            order=mixed(self.order, 1),
            samples=mixed(self.samples, 1),
            fetches=mixed(self.fetches, 1),
        )


def _seed(backend: Backend, epoch: int, stream: Stream) -> int:
    return step_seed(backend.seed, epoch, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """The start of an epoch, and its seeds.

    Args:
        epoch: The number of the epoch.
        batch_idx: Batches to skip, already trained on.
        seeds: Its seeds.
        skipped: Numbers of other batches to skip.
        num_before: Batches of earlier epochs to skip as well, where epochs share an iterator.
        restores: Whether the position was loaded; if not, the epoch follows the previous one.
        loader_state: The result of `Source.state` for the position; None = none.
        offset: Draws to skip, over all ranks if they divide the loader's draws.
        length: Batches of the epoch according to the loader; None = not known.
        limit: Number of batches after which the epoch ends; None = no limit.
        needs_sizes: Whether each rank's exact number of samples is required.
        needs_state: Whether a checkpoint may be saved in the epoch.
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
    """Call `set_epoch` of a loader, its samplers and its dataset, where defined."""
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
