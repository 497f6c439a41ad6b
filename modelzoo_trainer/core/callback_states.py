"""The states of users' callbacks: what of a checkpoint belongs to which."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


def load_states(
    trainer: Trainer,
    states: Mapping[str, Any],
    *,
    strict: bool,
    is_foreign: bool = False,
    ignored: Collection[str] = (),
) -> None:
    """Hand the states of a checkpoint to the callbacks whose names they have.

    Args:
        trainer: Whose callbacks.
        states: By name.
        strict: Warn of callbacks without a state, too.
        is_foreign: The checkpoint is another run's: leave out states that are of that run.
        ignored: Names of states that nobody has to take.
    """
    known = dict(trainer.stateful_callbacks())
    _warn_of_numbers(states, known)
    for name in states:
        if name not in known and name not in ignored:
            log.warning("The checkpoint has state of %s, which is not part of this run.", name)
    for name, callback in known.items():
        if name in states:
            if not (is_foreign and getattr(callback, "state_is_of_run", False)):
                _load_into(callback, name, states[name])
        elif states and strict:
            log.warning("The checkpoint has no state of %s; it starts anew.", name)


def _warn_of_numbers(states: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Warn if there are several callbacks of a class, and another number than before."""
    for kind in dict.fromkeys(type(callback).__name__ for callback in known.values()):
        own, before = (
            sum(re.fullmatch(rf"{kind}(_\d+)?", name) is not None for name in names)
            for names in (known, states)
        )
        if own != before and min(own, before) > 0:
            log.warning(
                "The checkpoint has state of %d callbacks of class %s, and this run has %d: the "
                "first of them gets the state of the first, and so on.",
                before,
                kind,
                own,
            )


def _load_into(callback: Any, name: str, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:
        error.add_note(f"raised in {name}.load_state_dict")
        raise
