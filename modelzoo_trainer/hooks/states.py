"""The states of callbacks in a checkpoint, by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

log = logging.getLogger("modelzoo_trainer.checkpoint")


def load_states(
    known: Mapping[str, Any],
    states: Mapping[str, Any],
    *,
    strict: bool,
    is_foreign: bool = False,
    ignored: Collection[str] = (),
    is_quiet: bool = False,
) -> list[str]:
    """Load the states of a checkpoint into the callbacks, by name.

    Args:
        known: The callbacks that have a state.
        states: Their states.
        strict: Also warn about callbacks without a state.
        is_foreign: The checkpoint is of another run: skip states that belong to that run.
        ignored: States not to warn about.
        is_quiet: Do not warn about states without a callback.

    Returns:
        Names of callbacks whose state was skipped.
    """
    _warn_of_numbers(states, known)
    for name in states:
        if name not in known and name not in ignored:
            log.log(
                logging.DEBUG if is_quiet else logging.WARNING,
                "The checkpoint has state of %s, which is not part of this run.",
                name,
            )
    skipped = []
    for name, callback in known.items():
        if name in states:
            if is_foreign and getattr(callback, "state_is_of_run", False):
                skipped.append(name)
            else:
                _load_into(callback, name, states[name])
        elif states and strict:
            log.warning("The checkpoint has no state of %s; it starts from scratch.", name)
    return skipped


def _warn_of_numbers(states: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Warn if the number of callbacks of a class has changed."""
    for kind in dict.fromkeys(type(callback).__name__ for callback in known.values()):
        own, before = (
            sum(re.fullmatch(rf"{kind}(_\d+)?", name) is not None for name in names)
            for names in (known, states)
        )
        if own != before and min(own, before) > 0:
            log.warning(
                "The number of %s callbacks was %d at the checkpoint and is now %d. The states are "
                "loaded in order: the first state into the first callback.",
                kind,
                before,
                own,
            )


def _load_into(callback: Any, name: str, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:
        error.add_note(f"raised in {name}.load_state_dict")
        raise
