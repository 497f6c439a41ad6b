"""What every schedule demands of its arguments; messages name the class and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from modelzoo_trainer.errors import ConfigError, suggest


def check_positive(owner: object, **arguments: float) -> None:
    """Refuse arguments that are not above zero.

    Args:
        owner: Whose arguments they are.
        **arguments: By name.

    Raises:
        ConfigError: If one is zero or negative.
    """
    for name, given in arguments.items():
        if not given > 0:
            raise ConfigError(f"{type(owner).__name__}.{name} is {given}; it must be above 0.")


def check_milestones(owner: object, milestones: Sequence[int]) -> None:
    """Refuse milestones that are not positive and increasing.

    Args:
        owner: Whose they are.
        milestones: Steps.

    Raises:
        ConfigError: If one is not above the one before it, or the first not above 0.
    """
    steps = [0, *milestones]
    if any(after <= before for before, after in pairwise(steps)):
        raise ConfigError(
            f"{type(owner).__name__}.milestones is {list(milestones)}; they must be above 0 and "
            f"increase."
        )


def check_choice(owner: object, name: str, given: str, known: Sequence[str]) -> None:
    """Refuse a text that is not one of the known ones.

    Args:
        owner: Whose argument it is.
        name: Of the argument.
        given: Its value.
        known: What fits.

    Raises:
        ConfigError: If `given` is not known.
    """
    if given not in known:
        raise ConfigError(f"{type(owner).__name__}.{name} is {given!r}. {suggest(given, known)}")
