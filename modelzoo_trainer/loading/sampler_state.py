"""Custom samplers: their state between epochs, and a check that it is complete."""

from __future__ import annotations

import logging
import zlib
from itertools import islice
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader

from modelzoo_trainer.loading.hidden_state import OF_SAMPLERS, HiddenState
from modelzoo_trainer.loading.position import EpochStart, set_epoch_of
from modelzoo_trainer.loading.sample_order import OrderSeed, replayed

log = logging.getLogger("modelzoo_trainer.data")

_NUM_COMPARED: Final = 3


class SamplerState:
    """The state of a loader's samplers at the start of an epoch.

    Generators and counters that a sampler keeps between epochs are saved and restored, and it is
    iterated from the start of the epoch. Two checks detect an order that depends on anything else:
    when fit() starts, a copy must yield the same first indices; on resume, the indices before the
    checkpoint must have the same checksum.

    Args:
        loader: A loader whose sampler must be iterated.
        name: The argument's name, for messages.
    """

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        batches: Any = loader.batch_sampler
        inner = loader.sampler if batches is None else getattr(batches, "sampler", None)
        owners = {"batch_sampler": batches, "sampler": inner}
        self._owners = {key: owner for key, owner in owners.items() if owner is not None}
        self._loader = loader
        self._sampler: Any = loader.sampler if batches is None else batches
        self._users = inner if type(batches) is BatchSampler else self._sampler
        self._name = name
        self._hidden = HiddenState(self._owners, OF_SAMPLERS, (loader.dataset,))
        self._state: dict[str, Any] = {}
        self._is_checked = self._has_looked = False
        self._checksum = 0
        self._first_kept = 0
        self._checksums: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._saved: tuple[int, int] | None = None

    def begin(self, start: EpochStart, num_skipped: int) -> None:
        """Restore the checkpoint's state, and save the state at the start of the epoch.

        Args:
            start: The start of the epoch.
            num_skipped: Draws that will be skipped.
        """
        saved = (start.loader_state or {}) if start.restores else {}
        if "sampler" in saved:
            self._warn_of_missing(self._hidden.load(saved["sampler"]))
            set_epoch_of(self._loader, start.epoch)  # loading the state may have reset it
        self._warn_of_unsaved(saved.get("unsaved", []))
        self._state = self._saved_now()
        self._warn_of_unsaved(self._hidden.newly_unsaved())
        self._checksum, self._checksums, self._first_kept = 0, {}, num_skipped
        order = saved.get("order")
        self._saved = None if order is None else (order["num_draws"], order["checksum"])
        if not self._is_checked:
            self._is_checked = True
            self._check(start)

    def _saved_now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"sampler": self._hidden.save()}
        return found | {"unsaved": self._hidden.unsaved} if self._hidden.unsaved else found

    def _warn_of_unsaved(self, names: list[str]) -> None:
        if names:
            self._warn(f"changes attributes that cannot be saved ({', '.join(names)})")

    def _check(self, start: EpochStart) -> None:
        """Warn about state that cannot be saved, and draw the expected indices from a copy."""
        if found := self._hidden.iterators():
            self._warn(f"keeps an iterator ({', '.join(found)}), whose position cannot be saved")
            return
        loader = self._loader
        order_seed = OrderSeed(start.seeds.order, start.epoch, loader.generator is None)
        try:
            copied = self._hidden.copied(self._sampler)
        except Exception as error:  # noqa: BLE001  # copying may raise anything
            log.debug(
                "The sampler %s cannot be deep-copied (%r), so its order is not compared after a "
                "resume.",
                type(self._sampler).__name__,
                error,
            )
            return
        copied_draws = replayed(copied, order_seed, is_batch=loader.batch_sampler is not None)
        checksum = 0
        for draw in islice(copied_draws, _NUM_COMPARED):
            checksum = self._expected[draw.number + 1] = _added(checksum, draw.items)
        self._hidden.load(self._state["sampler"])  # restore state shared with the copy

    def watch(self, number: int, items: Any) -> None:
        """Compare a draw with the expected one, and update the checksum."""
        if not self._has_looked:
            self._has_looked = True
            self._warn_of_unsaved(self._hidden.newly_lost())
        checksum = self._checksum = _added(self._checksum, items)
        if number + 1 >= self._first_kept:
            self._checksums[number + 1] = checksum
        if self._expected and self._expected.pop(number + 1, checksum) != checksum:
            self._expected.clear()
            self._warn(
                "yields other indices each time it is iterated, although no attribute changes"
            )
        if self._saved is not None and self._saved[0] == number + 1:
            is_equal, self._saved = self._saved[1] == checksum, None
            if not is_equal:
                self._warn("yields another order than before the checkpoint")

    def _warn(self, what: str) -> None:
        log.warning(
            "A resumed run may differ: the sampler of %s (%s) %s. A run resumed in the middle of "
            "an epoch would repeat some samples and skip others. Draw from a generator whose "
            "seed is an attribute of the sampler; or implement set_epoch(epoch), or state_dict() "
            "and load_state_dict().",
            self._name,
            type(self._users).__name__,
            what,
        )

    def _warn_of_missing(self, names: list[str]) -> None:
        if names:
            log.warning(
                "The resumed run may differ: the checkpoint has a state of %s, but the sampler of "
                "%s (%s) has no such attribute.",
                ", ".join(names),
                self._name,
                type(self._sampler).__name__,
            )

    def state(self, num_draws: int | None) -> dict[str, Any]:
        """Return the checkpoint state after `num_draws` draws; None = after a whole epoch."""
        found = self._saved_now() if num_draws is None else dict(self._state)
        if num_draws in self._checksums:
            found["order"] = {"num_draws": num_draws, "checksum": self._checksums[num_draws]}
        return found

    def forget_before(self, num_draws: int) -> None:
        """Drop the checksums of fewer draws."""
        for number in [number for number in self._checksums if number < num_draws]:
            del self._checksums[number]


def _added(checksum: int, items: Any) -> int:
    if isinstance(items, (list, tuple)):  # str() of a tensor is long or truncated
        items = [item.tolist() if hasattr(item, "tolist") else item for item in items]
    elif hasattr(items, "tolist"):
        items = items.tolist()
    return zlib.crc32(repr(items).encode(), checksum)
