"""Which tokens of a document that is too long are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.rows.interface import Array

_KEYS: Final = ("prompt_truncation_mode", "max_turn_length")
_MODES: Final = ("keep_start", "keep_end")
UNREAD: Final = "truncation_mode"
"""A key of `truncate_to_msl` in published files that nothing reads, in the Model Zoo neither."""
_STRUCTURE: Final = -2
"""Owner of a token that is kept because it ends a turn."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Setting `dataset.truncate_to_msl`, as published.

    Prompts are cut, longest first, to `max_turn_length`, then answers at their end. The token that
    ends a turn stays if other turns follow. A document that still does not fit is skipped.
    """

    is_on: bool = False
    keeps_end: bool = True
    """Whether a prompt loses its start instead of its end."""
    max_turn_length: int | None = None
    """Tokens that a cut prompt keeps; None = a row's."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Truncation:
        """Return the truncation of the settings; None = none, so that long documents are skipped.

        Raises:
            ConfigError: If a key or value is invalid.
        """
        if given is None:
            return cls()
        where = "dataset.truncate_to_msl"
        for key in given:
            if key not in (*_KEYS, UNREAD):
                raise ConfigError(f"{where}.{key}: no such setting. {suggest(str(key), _KEYS)}")
        mode, longest = given.get(_KEYS[0], "keep_end"), given.get(_KEYS[1])
        if mode not in _MODES:
            raise ConfigError(f"{where}.{_KEYS[0]}: {mode!r} is not one of {', '.join(_MODES)}.")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ConfigError(f"{where}.{_KEYS[1]}: an integer > 0 is expected, got {longest!r}.")
        return cls(True, mode == "keep_end", longest)

    def kept(self, owners: Array, is_end: Array, is_answer: Sequence[bool], length: int) -> Array:
        """Return the indices of the tokens that are kept; none if the document is to be skipped.

        Args:
            owners: Index of the turn of each token; negative = of none, which is always kept.
            is_end: Whether it ends its turn, and so is kept, unless the turn is an answer at the
                end of the document.
            is_answer: Of each turn, whether it is an answer, not a prompt.
            length: Tokens to keep, fewer than there are.

        Shapes:
            owners, is_end: (n,). Returns: (`length`,) int64, or (0,).
        """
        last = len(is_answer) - 1
        may_end = (owners == last) & is_answer[last]
        owners = np.where(is_end & ~may_end, _STRUCTURE, owners)
        keep = np.ones(len(owners), bool)
        excess = len(owners) - length
        tokens = {turn: np.flatnonzero(owners == turn) for turn in range(len(is_answer))}
        longest = length if self.max_turn_length is None else self.max_turn_length
        order = sorted(tokens, key=lambda turn: (is_answer[turn], -len(tokens[turn]), turn))
        for turn in order if self.is_on else ():
            own = tokens[turn]
            spare = len(own) if is_answer[turn] else max(0, len(own) - longest)
            cut = min(excess, spare)
            from_start = self.keeps_end and not is_answer[turn]
            keep[own[:cut] if from_start else own[len(own) - cut :]] = False
            excess -= cut
        return np.flatnonzero(keep) if excess == 0 else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class WholeAnswers:
    """Cut so that answers keep their ends, and so the token that ends them.

    1. The row ends with the last answer that fits.
    2. If none fits, the prompts before the first one are cut, the longest first, as far as needed;
       each keeps at least one token.
    3. If the answer does not fit even so, it loses its end; the prompts then keep at most half of
       the row.

    A document is skipped if no token of an answer fits.
    """

    keeps_end: bool
    """Whether a prompt loses its start instead of its end."""

    def kept(self, owners: Array, is_end: Array, is_answer: Sequence[bool], length: int) -> Array:
        """Return the indices of the tokens that are kept; see `Truncation.kept`.

        Shapes:
            owners, is_end: (n,). Returns: (at most `length`,) int64.
        """
        counts = np.isin(owners, np.flatnonzero(is_answer))
        if not self.keeps_end:  # else a prompt keeps its end anyway
            owners = np.where(is_end & ~counts, _STRUCTURE, owners)
        stops = [int(np.flatnonzero(owners == turn)[-1]) + 1 for turn in np.unique(owners[counts])]
        fitting = [stop for stop in stops if stop <= length]
        if fitting or not stops:
            return np.arange(max(fitting, default=0))
        stop = min(stops)
        keep = np.ones(stop, bool)
        own = owners[:stop]
        prompts = [np.flatnonzero(own == turn) for turn in np.unique(own[~counts[:stop]])]
        prompts = [tokens for tokens in prompts if owners[tokens[0]] >= 0]
        sizes = [len(tokens) for tokens in prompts]
        room = length - (stop - sum(sizes))
        limit = _limit(sizes, room if room >= len(sizes) else length // 2)
        for tokens in prompts:
            cut = max(0, len(tokens) - limit)
            keep[tokens[:cut] if self.keeps_end else tokens[len(tokens) - cut :]] = False
        kept = np.flatnonzero(keep)[:length]
        return kept if counts[kept].any() else kept[:0]


def _limit(sizes: Sequence[int], room: int) -> int:
    """Return the most that each of several sizes may have so that all fit."""
    limit, left = 0, room
    for number, size in enumerate(sorted(sizes)):
        limit = left // (len(sizes) - number)
        if size > limit:
            return limit
        left -= size
    return max(limit, max(sizes, default=0))
