"""Choose the tokens that a masked language model predicts, and hide them.

https://arxiv.org/abs/1810.04805, appendix A.1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from modelzoo_trainer.loading.seeded_sampler import mixed_seed

_HIDDEN: Final = 0.8  # of the chosen tokens; half of the others are replaced by a random one
_REPLACED: Final = 0.9
_CONTINUES: Final = "##"  # begins a piece that continues a word


class Masked(NamedTuple):
    """A sequence with hidden tokens.

    Args:
        ids: Its token ids.
        positions: Of the tokens to predict, increasing.
        labels: The tokens that were there.
    """

    ids: list[int]
    positions: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How tokens are hidden.

    Of n = min(max_predictions, max(1, round(probability * tokens))) chosen tokens, 80 % become
    `mask_id`, 10 % a random token, and 10 % stay.

    Args:
        probability: Share of the tokens of a sequence that are predicted.
        max_predictions: Of a sequence, at most.
        mask_id: In place of a hidden token.
        excluded: Tokens that are not predicted.
        replacements: Tokens from which a random one is drawn.
        whole_words: Whether all pieces of a word are predicted, or none.
    """

    probability: float
    max_predictions: int
    mask_id: int
    excluded: frozenset[str]
    replacements: Sequence[int]
    whole_words: bool = False

    @property
    def settings(self) -> tuple[object, ...]:
        """All arguments, as text the same in each run."""
        return (
            *(self.probability, self.max_predictions, self.mask_id, self.whole_words),
            *(tuple(sorted(self.excluded)), tuple(self.replacements)),
        )

    def mask(self, tokens: Sequence[str], ids: Sequence[int], seed: tuple[int, int, int]) -> Masked:
        """Hide tokens of a sequence.

        Args:
            tokens: The tokens.
            ids: Their ids.
            seed: Seed, epoch and row, on which the choice only depends.
        """
        draw = random.Random(mixed_seed(*seed))
        num = min(self.max_predictions, max(1, round(len(tokens) * self.probability)))
        words = self._words(tokens)
        draw.shuffle(words)
        chosen: list[int] = []
        for word in words:
            if len(chosen) == num:
                break
            if len(chosen) + len(word) <= num:
                chosen += word
        chosen.sort()
        hidden = list(ids)
        for place in chosen:
            share = draw.random()
            if share < _HIDDEN:
                hidden[place] = self.mask_id
            elif share < _REPLACED:
                hidden[place] = self.replacements[draw.randrange(len(self.replacements))]
        return Masked(hidden, chosen, [ids[place] for place in chosen])

    def _words(self, tokens: Sequence[str]) -> list[list[int]]:
        """Return the positions of each word, or of each token, that may be predicted."""
        words: list[list[int]] = []
        last = -1  # position of the piece before, if it may be predicted
        for place, token in enumerate(tokens):
            if token in self.excluded:
                continue
            if self.whole_words and token.startswith(_CONTINUES) and words and last == place - 1:
                words[-1].append(place)
            else:
                words.append([place])
            last = place
        return words
