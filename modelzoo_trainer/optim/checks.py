"""What optimizers and schedules demand of arguments; messages name the class and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

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
            raise ConfigError(f"{_name(owner)}.{name} is {given}; it must be above 0.")


def check_not_negative(owner: object, **arguments: float | Sequence[float]) -> None:
    """Refuse arguments that are below zero, or not finite.

    Args:
        owner: Whose arguments they are.
        **arguments: Numbers by name, or several each.

    Raises:
        ConfigError: If one does not fit.
    """
    for name, given in arguments.items():
        if not all(0 <= number < inf for number in _numbers(given)):
            raise ConfigError(_text(owner, name, given, "a number from 0 on"))


def check_fractions(owner: object, **arguments: float | Sequence[float]) -> None:
    """Refuse arguments that are not at least 0 and below 1.

    Args:
        owner: Whose arguments they are.
        **arguments: Numbers by name, or several each.

    Raises:
        ConfigError: If one does not fit.
    """
    for name, given in arguments.items():
        if not all(0 <= number < 1 for number in _numbers(given)):
            raise ConfigError(_text(owner, name, given, "at least 0 and below 1"))


def check_pair(owner: object, **arguments: Sequence[float]) -> None:
    """Refuse arguments that are not two numbers.

    Args:
        owner: Whose arguments they are.
        **arguments: By name.

    Raises:
        ConfigError: If there are more or fewer.
    """
    for name, given in arguments.items():
        if len(given) != 2:
            raise ConfigError(f"{_name(owner)}.{name} is {list(given)}; it must have two numbers.")


def _numbers(given: float | Sequence[float]) -> Sequence[float]:
    return given if isinstance(given, Sequence) else (given,)


def _text(owner: object, name: str, given: float | Sequence[float], fits: str) -> str:
    if isinstance(given, Sequence):
        return f"{_name(owner)}.{name} is {list(given)}; each must be {fits}."
    return f"{_name(owner)}.{name} is {given}; it must be {fits}."


def _name(owner: object) -> str:
    return type(owner).__name__


def check_milestones(owner: object, milestones: Sequence[int]) -> None:
    """Refuse milestones that are not positive and increasing.

    Args:
        owner: Whose they are.
        milestones: Steps.

    Raises:
        ConfigError: If there is none, one is not above that before it, or the first not above 0.
    """
    if not milestones:
        raise ConfigError(f"{_name(owner)}.milestones is empty; it needs at least one step.")
    steps = [0, *milestones]
    if any(after <= before for before, after in pairwise(steps)):
        raise ConfigError(
            f"{_name(owner)}.milestones is {list(milestones)}; they must be above 0 and increase."
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
        raise ConfigError(f"{_name(owner)}.{name} is {given!r}. {suggest(given, known)}")
