"""The curves that schedules of learning rates and of weight decay share."""

from __future__ import annotations

from math import cos, pi


def linear(start: float, end: float, total: int, step: int) -> float:
    """Return the value of a straight line that stays at its end."""
    if step >= total:
        return end
    return end + (start - end) * (1 - step / total)


def cosine(start: float, end: float, total: int, step: int) -> float:
    """Return the value of half a cosine wave that stays at its end."""
    if step >= total:
        return end
    return end + (start - end) * (1 + cos(pi * step / total)) / 2


def cosine_wave(start: float, end: float, half: float, step: float) -> float:
    """Return the value of a cosine wave that is at its end after every odd number of halves."""
    return end + (start - end) * (1 + cos(pi * step / half)) / 2
