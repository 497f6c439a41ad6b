"""The training data of a fit: what the dataloader argument stands for, and how passes begin."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from modelzoo_trainer.callback import Batch, Loader
from modelzoo_trainer.core.data_facts import check_position
from modelzoo_trainer.core.data_position import PassSeeds, Position, tell_epoch
from modelzoo_trainer.core.passes import Begun, exact_length, last_index, resolve_loader
from modelzoo_trainer.core.sources import LoaderState, Source, Start, make_source
from modelzoo_trainer.errors import ConfigError

log = logging.getLogger("modelzoo_trainer.data")


class Feed:
    """The training data of a fit.

    Args:
        given: An iterable of batches, or a callable that returns one.
        limit: Batches after which `loop.steps_per_epoch` ends a pass; None = none.

    Raises:
        ConfigError: If it is neither.
    """

    def __init__(self, given: Loader, limit: int | None) -> None:
        self.loader: Iterable[Batch] = resolve_loader(given, "train_dataloader")
        self.limit = limit
        self.is_used = False
        self.host_seed: int | None = None
        """What the generators of this process are seeded from after a fetch; None = they are not
        touched."""
        self._given = given
        self._source: Source | None = None

    def begin(
        self, position: Position, seeds: PassSeeds, passed_over: frozenset[int], *, restores: bool
    ) -> Begun:
        """Begin a pass.

        Args:
            position: Where.
            seeds: Of its random numbers.
            passed_over: Numbers of batches to leave out.
            restores: Whether the position was loaded; if not, the pass follows the one before.

        Raises:
            ConfigError: If it would be over already, or cannot begin there.
        """
        source = self._source_of_pass(position, restores=restores)
        loader = source.loader
        tell_epoch(loader, position.epoch)
        length = exact_length(loader)
        check_position(position.batch_idx, length, self.limit)
        start = Start(
            epoch=position.epoch,
            position=position.batch_idx,
            passed_over=passed_over,
            seeds=seeds,
            before=self._num_before(position.epoch) if restores else 0,
            restores=restores,
            loader_state=position.loader,
        )
        self.host_seed = seeds.fetches if source.seeds_host else None
        items = source.begin(start)
        self.is_used = True
        return Begun(
            items=items,
            length=None if source.reads_to_end else length,
            position=position.batch_idx,
            parts=position.parts,
            passed_over=passed_over,
        )

    def _source_of_pass(self, position: Position, *, restores: bool) -> Source:
        if self.is_used and isinstance(self.loader, Iterator):
            if self._given is not self.loader:
                self.loader = resolve_loader(self._given, "train_dataloader")
                self.close()
                self._source = None
            elif restores and type(self._source) is Source:
                raise ConfigError(
                    f"train_dataloader is an iterator, and the run goes back to batch "
                    f"{position.batch_idx} of pass {position.epoch}, which it has left behind. "
                    f"Pass a callable that makes it anew."
                )
        if self._source is None:
            self._source = make_source(self.loader)
        return self._source

    def _num_before(self, epoch: int) -> int:
        """Return how many batches earlier passes have taken from an iterator that all share."""
        is_shared = isinstance(self.loader, Iterator) and self._given is self.loader
        return epoch * (self.limit or 0) if is_shared else 0

    def state(self, position: int | None) -> LoaderState | None:
        """Return the loader's own state after so many batches; None = after a whole pass."""
        return None if self._source is None else self._source.state(position)

    def forget_before(self, position: int) -> None:
        """Drop the loader's states from before a position."""
        if self._source is not None:
            self._source.forget_before(position)

    def has_nothing_left(self, position: int, passed_over: frozenset[int]) -> bool:
        """Return whether all the rest of a pass is passed over, as far as its length is known."""
        ends = [end for end in (exact_length(self.loader), self.limit) if end is not None]
        return (
            bool(ends)
            and position < min(ends)
            and last_index(position, min(ends), passed_over) is None
        )

    def explain_empty(self, num_batches: int) -> str:
        """Return why there is no batch, after so many forward passes."""
        if num_batches and exact_length(self.loader) is None:
            return (
                f"train_dataloader gave {num_batches} batches and cannot be iterated again. "
                f"Pass a callable that makes it anew for each pass."
            )
        return (
            "train_dataloader yields no batch. Check the data, the split, and whether drop_last "
            "with this batch_size leaves anything."
        )

    def close(self) -> None:
        """End the pass and its workers."""
        if self._source is not None:
            self._source.close()
