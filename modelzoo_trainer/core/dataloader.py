"""The training data: passes, epochs, position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.callback import Batch, CoreCallback, Loader, StateDict
from modelzoo_trainer.core.backend import Stream
from modelzoo_trainer.core.passes import Pass, exact_length, known_length, resolve_loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class DataLoaderCallback(CoreCallback):
    """Owns the position in the training data.

    The order of a shuffling loader is a function of (seed, epoch): torch's host generator is
    seeded when a pass begins. A run that resumes in the middle of a pass leaves out the batches
    that were trained on.

    `begins_epoch` says whether the next batch is the first that this fit takes of a pass,
    `is_last` whether the batch at hand is the last of one.

    With `micro_batch_size` the loader's batches are trained on in parts; `batch_idx` counts whole
    ones.

    State: `dataloader`: `epoch`, `batch_idx` (batches of the pass consumed), `num_batches`
        (forward passes since the start).
    """

    micro_batch_size: int | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.batch_idx = 0
        self.num_batches = 0
        self.is_last = False
        self.loader: Iterable[Batch] | None = None
        self._source: Loader = None
        self._is_used = False
        self.begins_epoch = True
        self._pass: Pass | None = None
        self._was_loaded = False

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._source = train_dataloader
        self._is_used = False
        self.loader = resolve_loader(train_dataloader, "train_dataloader")
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._forget_pass()
        self.loader = self._source = None
        self._was_loaded = False

    def _forget_pass(self) -> None:
        self._pass = None
        self.begins_epoch = True

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self.batch_idx and not self._was_loaded:  # an earlier fit stopped within a pass
            self.epoch += 1
            self.batch_idx = 0

    def next_batch(self, trainer: Trainer) -> Batch:
        """Return the next training batch, on the device, and count it as consumed.

        Raises:
            ConfigError: If a pass has no batch.
        """
        if self._pass is None:
            self._pass = self._begin(trainer)
            self.begins_epoch = False
        try:
            batch, self.is_last = next(self._pass.items)
        except StopIteration:
            raise ConfigError(self._explain_empty()) from None
        self.batch_idx += self._pass.ends_batch
        self.num_batches += 1
        return batch

    def end_epoch(self) -> None:
        """Go on to the next pass."""
        self.epoch += 1
        self.batch_idx = 0
        self._forget_pass()

    def _begin(self, trainer: Trainer) -> Pass:
        if self._is_used and isinstance(self.loader, Iterator) and self._source is not self.loader:
            self.loader = resolve_loader(self._source, "train_dataloader")
        self._is_used = True
        loader = self.loader
        assert loader is not None  # set for the length of a fit
        trainer.backend.seed_host(self.epoch, Stream.EPOCH)
        for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)
        skip = self.batch_idx
        limit = trainer.schedule.batches_per_epoch
        num = exact_length(loader)
        if limit is not None and limit <= skip:
            raise ConfigError(
                f"the checkpoint was made after batch {skip} of a pass, but loop.steps_per_epoch "
                f"ends a pass after {limit}. Use the one that it was made with."
            )
        if num is not None and 0 < num <= skip:
            raise ConfigError(
                f"the checkpoint was made after batch {skip} of a pass, but train_dataloader has "
                f"{num}. Use the data and batch size that it was made with."
            )
        return Pass(
            loader,
            trainer.backend.batches,
            limit=limit,
            skip=skip,
            micro_batch_size=self.micro_batch_size,
        )

    @property
    def ends_batch(self) -> bool:
        """Whether what is at hand is a whole batch of the loader, or the last part of one."""
        assert self._pass is not None  # there is a batch at hand
        return self._pass.ends_batch

    @property
    def num_parts(self) -> int:
        """In how many parts the loader's batch at hand is trained on."""
        assert self._pass is not None  # there is a batch at hand
        return self._pass.num_parts

    def _explain_empty(self) -> str:
        if self.num_batches and self.loader is not None and exact_length(self.loader) is None:
            return (
                f"train_dataloader gave {self.num_batches} batches and cannot be iterated again. "
                f"Pass a callable that makes it anew for each pass."
            )
        return (
            "train_dataloader yields no batch. Check the data, the split, and whether drop_last "
            "with this batch_size leaves anything."
        )

    def num_batches_per_pass(self) -> int | None:
        """Return how many batches a pass has, as far as the loader tells."""
        return None if self.loader is None else known_length(self.loader)

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        is_complete = self._pass is not None and self.is_last
        state_dict["dataloader"] = {
            "epoch": self.epoch + 1 if is_complete else self.epoch,
            "batch_idx": 0 if is_complete else self.batch_idx,
            "num_batches": self.num_batches,
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        state = state_dict.get("dataloader")
        if state is None:
            return
        self.epoch = state["epoch"]
        self.batch_idx = state["batch_idx"]
        self.num_batches = state["num_batches"]
        self._forget_pass()
        self._was_loaded = True
