"""From the text of documents to tokens, each with its weight in the loss and its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import Array, Document
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer
from modelzoo_trainer.zoo.rows.turns import Turn, TurnRegion, turns_of

NO_TURN: Final = -1
"""Owner of a token that is part of no turn: a separator, or text of the chat template."""


class TurnSpan(NamedTuple):
    """Characters start to stop, which belong to a turn and have a weight in the loss.

    Characters from `end` on are not content, they end the turn; None = there are none.
    """

    start: int
    stop: int
    turn: int
    weight: int
    end: int | None = None


class Piece(NamedTuple):
    """Text that is tokenized as a whole, and the places of its regions, in order."""

    text: str
    places: list[TurnSpan]


class Tokenized(NamedTuple):
    """Tokens of a piece."""

    ids: Array  # (n,) int32
    weights: Array  # (n,) int32
    owners: Array  # (n,) int32: index of the turn, or NO_TURN
    is_end: Array  # (n,) bool: whether it ends its turn, instead of being its content


def document_turns(document: Document) -> tuple[Turn, ...]:
    """Return the turns of a document."""
    return turns_of(document.content, document.file)


def text_of(region: TurnRegion, document: Document) -> str:
    """Return the text of a region.

    Raises:
        ConfigError: If it holds token ids.
    """
    if isinstance(region.content, str):
        return region.content
    raise ConfigError(
        f"{document.where}: region {region.name!r} holds token ids; this mode "
        "tokenizes text. Use a read hook for text, or setup.mode: nlg."
    )


class RegionRules:
    """Loss weight of each region, and which are dropped: as the hook says, else the settings.

    `processing.semantic_loss_weight` and `semantic_drop_mask` are `{role: {region: value}}`, or
    `{region: value}` for all roles.

    Args:
        settings: The settings of the run.
        counted: Roles that count in the loss by default; None = all.

    Raises:
        ConfigError: If a value is not 0 or 1.
    """

    uses: Final = frozenset({"semantic_loss_weight", "semantic_drop_mask"})

    def __init__(self, settings: PreprocessingSettings, counted: frozenset[str] | None) -> None:
        given = settings.processing
        self._weights = _by_region(given.semantic_loss_weight, "semantic_loss_weight")
        self._drops = _by_region(given.semantic_drop_mask, "semantic_drop_mask")
        self._counted = counted
        seen = _by_region(given.semantic_attention_mask, "semantic_attention_mask")
        if not all(seen.values()):
            raise ConfigError(
                "processing.semantic_attention_mask has no effect on text: every token is attended "
                "to. Remove it, or drop the region with semantic_drop_mask."
            )

    def weight(self, role: str, region: TurnRegion) -> int:
        """Return 1 if the tokens of a region count in the loss, else 0."""
        if region.loss_weight is not None:
            return int(region.loss_weight)
        default = int(self._counted is None or role in self._counted)
        return _rule(self._weights, role, region.name, default)

    def kept(self, turn: Turn) -> list[TurnRegion]:
        """Return the regions of a turn that are not dropped."""
        return [region for region in turn.regions if not self._is_dropped(turn.role, region)]

    def _is_dropped(self, role: str, region: TurnRegion) -> bool:
        if region.is_dropped is not None:
            return region.is_dropped
        return bool(_rule(self._drops, role, region.name, 0))


def tokenize(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[Tokenized]:
    """Return the tokens of pieces, without those that the tokenizer puts around a text.

    A token belongs to the region of its characters. One that stands for characters of two regions
    belongs to the one that counts in the loss, else to the first.
    """
    cuts = [_cuts(piece.places) for piece in pieces]
    texts = [piece.text for piece in pieces]
    encoded = tokenizer.encode_with_spans(texts, add_special_tokens=False, cuts=cuts)
    return [
        _placed(piece.places, np.array(one.ids, np.int32), np.array(one.spans, np.int64))
        for piece, one in zip(pieces, encoded, strict=True)
    ]


def _placed(places: Iterable[TurnSpan], ids: Array, spans: Array) -> Tokenized:
    spans = spans.reshape(-1, 2)
    weights, owners = np.zeros(len(ids), np.int32), np.full(len(ids), NO_TURN, np.int32)
    # The searches need increasing places; a token of no characters is part of no region.
    starts, stops = np.maximum.accumulate(spans, axis=0).T
    empty = spans[:, 0] >= spans[:, 1]
    is_end = np.zeros(len(ids), bool)
    for place in places:
        first = int(np.searchsorted(stops, place.start, "right"))
        last = int(np.searchsorted(starts, place.stop, "left"))
        inside = np.arange(first, max(first, last))
        is_new = ~empty[inside] & ((owners[inside] == NO_TURN) | (weights[inside] < place.weight))
        owners[inside[is_new]] = place.turn
        weights[inside[is_new]] = place.weight
        if place.end is not None:
            is_end[inside[is_new & (spans[inside, 1] > place.end)]] = True
    return Tokenized(ids, weights, owners, is_end)


def _cuts(places: Iterable[TurnSpan]) -> list[int]:
    return sorted({edge for place in places for edge in (place.start, place.stop)})


def _by_region(given: Mapping[str, Any] | None, key: str) -> dict[tuple[str | None, str], int]:
    found: dict[tuple[str | None, str], int] = {}
    for outer, value in (given or {}).items():
        pairs = value.items() if isinstance(value, Mapping) else [(outer, value)]
        role = outer if isinstance(value, Mapping) else None
        for region, number in pairs:
            if number not in (0, 1):
                where = f"processing.{key}.{outer}" + (f".{region}" if role else "")
                raise ConfigError(f"{where}: 0 or 1 is expected, got {number!r}.")
            found[role, region] = int(number)
    return found


def _rule(rules: Mapping[tuple[str | None, str], int], role: str, name: str, default: int) -> int:
    return rules.get((role, name), rules.get((None, name), default))


def document_piece(document: Document, rules: RegionRules) -> Piece:
    """Return the text of the regions of a document that are not dropped, one after the other."""
    texts, places, size = [], [], 0
    for index, turn in enumerate(document_turns(document)):
        for region in rules.kept(turn):
            text = text_of(region, document)
            weight = rules.weight(turn.role, region)
            places.append(TurnSpan(size, size + len(text), index, weight))
            texts.append(text)
            size += len(text)
    return Piece("".join(texts), places)
