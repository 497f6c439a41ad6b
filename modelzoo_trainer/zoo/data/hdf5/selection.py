"""Which rows of each folder are the samples, and how many of each in an epoch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.data.folders import distinct_folders

_RANGE: Final = re.compile(r"\s*(\d*\.?\d+|\d+\.)\s*-\s*(\d*\.?\d+|\d+\.)\s*")
_KEYS: Final = ("data_dir", "weight", "data_subset")
_ADVICE: Final = "Remove one; to use some folders more than others, set mixture."
_SMALL: Final = Fraction(1, 20)
"""Members of a smaller share of a mixture do not decide the length of its epoch."""

Ranges = tuple[tuple[Fraction, Fraction], ...]
WHOLE: Final[Ranges] = ((Fraction(0), Fraction(1)),)


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Folders with samples.

    Args:
        argument: Where the configuration names them, for messages.
        folders: The folders.
        ranges: The parts of their samples that are used.
        weight: Share of the samples in an epoch; of all weights, the sum is 1.
    """

    argument: str
    folders: tuple[str, ...]
    ranges: Ranges = WHOLE
    weight: Fraction = Fraction(1)


class SampleRange(NamedTuple):
    """Consecutive samples of a source: those with numbers in [start, stop)."""

    start: int
    stop: int


def parse_sources(
    data_dir: str | Sequence[str] | None,
    mixture: Sequence[Any] | None,
    data_subset: str | None,
) -> list[SampleSource]:
    """Return the sources of samples that the arguments of a data processor name.

    Members of a mixture without weight are left out.

    Raises:
        ConfigError: If they exclude each other, or one is invalid.
    """
    if (data_dir is None) == (mixture is None):
        given = "neither is set" if data_dir is None else "both are set"
        raise ConfigError(f"data_dir and mixture: {given}. Set one of them.")
    if mixture is None:
        assert data_dir is not None  # one of the two is given
        ranges = parse_ranges(data_subset, "data_subset")
        return [SampleSource("data_dir", _folders(data_dir, "data_dir"), ranges)]
    if data_subset is not None:
        raise ConfigError(
            f"data_subset ({data_subset!r}) cannot be set together with mixture. Set data_subset "
            f"in the elements of mixture."
        )
    found = [_member(one, f"mixture[{number}]") for number, one in enumerate(mixture)]
    total = sum((one.weight for one in found), Fraction(0))
    if not total:
        raise ConfigError(
            f"mixture: none of the {len(found)} elements has a weight above 0. Increase a weight, "
            f"or set data_dir instead of mixture."
        )
    return [
        SampleSource(one.argument, one.folders, one.ranges, one.weight / total)
        for one in found
        if one.weight
    ]


def _folders(data_dir: object, where: str) -> tuple[str, ...]:
    return distinct_folders(data_dir, where, _ADVICE)


def _member(given: object, where: str) -> SampleSource:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping with data_dir, weight and, if needed, data_subset, got "
            f"{given!r}."
        )
    for key in given:
        if key not in _KEYS:
            raise ConfigError(f"{where} has no key {key!r}. {suggest(str(key), _KEYS)}")
    for key in ("data_dir", "weight"):
        if key not in given:
            raise ConfigError(f"{where}: {key} is missing. Set it for each element of mixture.")
    return SampleSource(
        f"{where}.data_dir",
        _folders(given["data_dir"], f"{where}.data_dir"),
        parse_ranges(given.get("data_subset"), f"{where}.data_subset"),
        _weight(given["weight"], f"{where}.weight"),
    )


def _weight(given: object, where: str) -> Fraction:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return Fraction(given)
    if not isinstance(given, float) or not math.isfinite(given) or given < 0:
        raise ConfigError(f"{where}: expected a number >= 0, got {given!r}.")
    return Fraction(repr(given))  # as written: 0.1 is a tenth


def parse_ranges(text: object, where: str) -> Ranges:
    """Return the ranges that a text such as `0.0-0.3,0.7-1.0` means; None = everything.

    Raises:
        ConfigError: If it is malformed, or ranges are empty, overlap or are not ascending.
    """
    if text is None:
        return WHOLE
    found = []
    for part in text.split(",") if isinstance(text, str) else [""]:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{where}: expected ranges of fractions such as '0.0-0.3,0.7-1.0', got {text!r}."
            )
        found.append((Fraction(match[1]), Fraction(match[2])))
    bounds = [bound for pair in found for bound in pair]
    is_ascending = all(start < stop for start, stop in found) and bounds == sorted(bounds)
    if not is_ascending or bounds[-1] > 1:
        raise ConfigError(
            f"{where}: got {text!r}, but the ranges must be ascending, without overlap, and "
            f"between 0 and 1."
        )
    return tuple(found)


def runs_of(ranges: Ranges, num: int) -> list[SampleRange]:
    """Return the ranges as numbers of samples, of `num`; those that have none are left out."""
    bounds = [
        SampleRange(math.floor(num * start), math.floor(num * stop)) for start, stop in ranges
    ]
    return [run for run in bounds if run.start < run.stop]


def shares_of(
    weights: Sequence[Fraction], lengths: Sequence[int], num_samples: int | None
) -> list[int]:
    """Return how many samples of each source are in an epoch.

    The proportions are the weights, rounded so that the sum is the length of the epoch (largest
    remainders). The epoch is `num_samples` long, or as long as it takes until every source whose
    weight is above 0.05 has been used up; smaller sources repeat.

    Args:
        weights: With sum 1.
        lengths: Samples of each source.
        num_samples: Samples of the epoch; None = see above.
    """
    total = num_samples
    if total is None:
        pairs = list(zip(weights, lengths, strict=True))
        large = [pair for pair in pairs if pair[0] > _SMALL] or pairs
        total = max(math.floor(length / weight) for weight, length in large)
    quotas = [total * weight for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda one: shares[one] - quotas[one])
    for one in by_remainder[: total - sum(shares)]:
        shares[one] += 1
    return shares
