"""A trainer's parts with functions around their methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from typing_extensions import override

from modelzoo_trainer.core.trainer_arguments import check_arguments
from modelzoo_trainer.errors import ConfigError, StopTraining
from modelzoo_trainer.hooks.global_callbacks import global_pairs
from modelzoo_trainer.interceptors import (
    INIT,
    AdvisedMethods,
    Pair,
    canonical,
    class_pairs,
    is_pair,
    pair_of,
    split_pair,
    unknown_event,
)
from modelzoo_trainer.trainer_parts import CallbackHandle, TrainerParts

_RUNS: Final = frozenset({"__init__", "fit", "validate", "validate_all"})


class PairHandle(CallbackHandle):
    """What takes an added function out of its trainer again, and no other that is like it."""

    def __init__(self, parts: AdvisedParts, pair: Pair) -> None:
        super().__init__(parts, pair)
        self._remove = partial(parts.keep_pairs, lambda known: known is not pair)

    @override
    def remove(self) -> None:
        """Take the function out; a second call does nothing."""
        self._remove()


class AdvisedParts(TrainerParts, AdvisedMethods):
    """Everything of a trainer but the sequence; takes pairs such as `("post-forward", f)`.

    A pair is for an event of the trainer or of its core callbacks; if several have it, for all.
    Functions are called in the order of the classes, of the trainer's `callbacks`, then those
    added, then global. One of a class whose event the trainer does not have is for its parts.

    Args:
        model_dir: Where everything is written.
        callbacks: The user's, and pairs.
        loggers: Those that receive metrics.
        check_loss: Whether to add `CheckLoss()` where nobody else acts on a bad loss.
        core: The arguments of the core callbacks, by name.

    Raises:
        ConfigError: If nobody has the event of a pair, or its function does not fit.
    """

    if not TYPE_CHECKING:  # the constructor's signature counts for a checker

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            """Make the object, if the constructor has these arguments."""
            check_arguments(cls, args, kwargs)
            return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        model_dir: str | Path,
        callbacks: Any,
        loggers: Any,
        *,
        check_loss: bool,
        core: Mapping[str, Any],
    ) -> None:
        pairs, others = parted(callbacks)
        of_classes = [pair for pair in class_pairs(type(self)) if not self._is_own(pair)]
        self._pairs = [pair_of(self, pair) for pair in of_classes]
        self._pairs += [(event, function) for event, function in pairs]  # of its own, for removal
        self._placed: list[Pair] = []
        super().__init__(model_dir, others, loggers, check_loss=check_loss, core=core)

    @override
    @classmethod
    def own_pairs(cls) -> tuple[Pair, ...]:
        return tuple(pair for pair in class_pairs(cls) if cls._is_own(pair))

    @classmethod
    def _is_own(cls, pair: Pair) -> bool:
        """Return whether a function is for the trainer itself, and not for its core callbacks."""
        if not is_pair(pair):
            return True  # which is refused there
        _, _, name = canonical(pair[0]).partition("-")
        return name in (INIT, *cls.events())

    @override
    def rebuild_hooks(self) -> None:
        super().rebuild_hooks()
        wanted = [*self._pairs, *global_pairs()]
        if len(wanted) == len(self._placed) and all(map(_is, wanted, self._placed)):
            return
        before = self._placed
        try:
            self._place(wanted)
        except ConfigError:
            self._place(before)
            raise

    def _place(self, pairs: list[Pair]) -> None:
        """Give functions to whoever has their events, in place of those that were given before."""
        for block in self._blocks():
            block.drop_pairs(self._placed)
        self._placed = list(pairs)
        for pair in pairs:
            for block in self._blocks_of(pair):
                block.add_pair_once(pair)

    def _blocks(self) -> list[AdvisedMethods]:
        core = list(self.callbacks.values())[: self._num_core]
        return [block for block in (self, *core) if isinstance(block, AdvisedMethods)]

    def _blocks_of(self, pair: Pair) -> list[AdvisedMethods]:
        _, name, _ = split_pair(pair, "callbacks")
        if name == INIT:
            raise ConfigError(
                f"callbacks: {pair[0]!r} comes too late for the trainer, which is being made. Give "
                f"it in the list `callbacks` of a subclass, or use a callback's pre_setup or "
                f"post_setup."
            )
        blocks = self._blocks()
        found = [block for block in blocks if _has(block, name)]
        if not found:
            known = {event for block in blocks for event in block.events()}
            raise unknown_event("callbacks", pair[0], known)
        return found

    @override
    def add_callback(self, callback: Any) -> CallbackHandle:
        """Add a callback after those of its kind, and set it up; or a function of an event.

        Args:
            callback: A callback, a logger, or a pair such as `("post-forward", f)`.

        Returns:
            A handle whose `remove` takes it out again.

        Raises:
            HookError: If it does not fit.
            ConfigError: If nobody has the event of a pair, or its function does not fit.
        """
        if not is_pair(callback):
            return super().add_callback(callback)
        event, function = callback
        added = (event, function)  # one of its own, for the handle
        self._pairs.append(added)
        try:
            self.rebuild_hooks()
        except ConfigError:
            self._pairs.pop()
            raise
        return PairHandle(self, added)

    @override
    def remove_callback(self, callback: Any) -> None:
        """Take a callback, logger or pair of this trainer out; nothing happens if it has it not."""
        if is_pair(callback):
            self.keep_pairs(lambda known: known != callback)
        else:
            super().remove_callback(callback)

    def keep_pairs(self, wanted: Callable[[Pair], bool]) -> None:
        """Take the other pairs of this trainer out.

        Args:
            wanted: Returns whether a pair stays.
        """
        self._pairs = [known for known in self._pairs if wanted(known)]
        self.rebuild_hooks()

    @override
    def heed_stop(self, stop: StopTraining, attribute: str) -> None:
        if attribute in _RUNS:  # no run is under way, or it is a whole validation that ends
            raise stop
        self.early_exit.grant(stop)


def parted(callbacks: Any) -> tuple[list[Pair], Any]:
    """Return the pairs among a user's callbacks, and the other ones as they were given.

    Args:
        callbacks: An iterable, or a single one.
    """
    if is_pair(callbacks):
        return [callbacks], ()
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, (str, Mapping)):
        return [], callbacks
    given = list(callbacks)
    return [one for one in given if is_pair(one)], [one for one in given if not is_pair(one)]


def _has(block: AdvisedMethods, name: str) -> bool:
    return name in block.events()


def _is(first: object, second: object) -> bool:
    return first is second
