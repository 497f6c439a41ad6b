"""Assignment of a trainer's interceptors to the trainer and its core callbacks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors.classes import class_pairs, pair_of
from modelzoo_trainer.hooks.interceptors.functions import (
    INIT,
    Pair,
    canonical,
    is_pair,
    split_pair,
    unknown_event,
)
from modelzoo_trainer.hooks.interceptors.objects import InterceptableMethods


class Interceptors:
    """The interceptors of a trainer and its core callbacks, such as `("post-forward", f)`.

    Each is for an event of the trainer or of a core callback; if several have the event, for all.
    Order: from the classes, from the trainer's `callbacks`, added ones, global ones.

    The trainer is held weakly. `pairs`: the user's.

    Raises:
        ConfigError: On placement, if the event of a pair is unknown, or its function does not fit.
    """

    def __init__(
        self, owner: InterceptableMethods, parts: Iterable[Any], pairs: Iterable[Pair]
    ) -> None:
        self._owner = weakref.ref(owner)
        self._parts = [part for part in parts if isinstance(part, InterceptableMethods)]
        cls = type(owner)
        of_classes = [pair for pair in class_pairs(cls) if not is_own_pair(cls, pair)]
        self._pairs = [pair_of(owner, pair) for pair in of_classes]
        self._pairs += [
            (event, function) for event, function in pairs
        ]  # copies, for removal by identity
        self._placed: list[Pair] = []

    def place(self, global_pairs: Iterable[Pair]) -> None:
        """Assign the functions to the owners of their events, replacing those assigned before."""
        wanted = [*self._pairs, *global_pairs]
        if len(wanted) == len(self._placed) and all(map(is_, wanted, self._placed)):
            return
        before = self._placed
        try:
            self._place(wanted)
        except ConfigError:
            self._place(before)
            raise

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The assigned pairs, including global ones."""
        return tuple(self._placed)

    def add(self, pair: Pair) -> Pair:
        """Return a copy of the pair, which is not placed yet."""
        event, function = pair
        added = (event, function)
        self._pairs.append(added)
        return added

    def keep(self, wanted: Callable[[Pair], bool]) -> None:
        """Drop the other pairs at the next placement."""
        self._pairs = [known for known in self._pairs if wanted(known)]

    def _place(self, pairs: list[Pair]) -> None:
        for owner in self._owners():
            owner.drop_pairs(self._placed)
        self._placed = list(pairs)
        for pair in pairs:
            for owner in self._owners_of(pair):
                owner.add_pair_once(pair)

    def _owners(self) -> list[InterceptableMethods]:
        owner = self._owner()
        return self._parts if owner is None else [owner, *self._parts]

    def _owners_of(self, pair: Pair) -> list[InterceptableMethods]:
        _, name, _ = split_pair(pair, "callbacks")
        if name == INIT:
            raise ConfigError(
                f"callbacks: {pair[0]!r} is too late, because the trainer is already being "
                f"created. Add the pair to the class attribute 'callbacks' of a Trainer subclass, "
                f"or define pre_setup or post_setup in a callback."
            )
        owners = self._owners()
        found = [owner for owner in owners if name in owner.events()]
        if not found:
            known = {event for owner in owners for event in owner.events()}
            raise unknown_event("callbacks", pair[0], known)
        return found


def is_own_pair(cls: type[InterceptableMethods], pair: Pair) -> bool:
    """Return whether a function of a class is for the object itself, not for its parts."""
    if not is_pair(pair):
        return True  # which is rejected there
    _, _, name = canonical(pair[0]).partition("-")
    return name in (INIT, *cls.events())


def parted(callbacks: Any) -> tuple[list[Pair], Any]:
    """Split a user's callbacks into the interceptor pairs and the others, as given."""
    if is_pair(callbacks):
        return [callbacks], ()
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, (str, Mapping)):
        return [], callbacks
    given = list(callbacks)
    return [one for one in given if is_pair(one)], [one for one in given if not is_pair(one)]
