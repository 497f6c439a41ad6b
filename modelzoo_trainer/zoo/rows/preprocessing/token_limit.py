"""Stop after a number of tokens, at the end of the document that reaches it."""

from __future__ import annotations

import numpy as np

from modelzoo_trainer.zoo.rows.interface import Array, Packed, Rows, Tokens
from modelzoo_trainer.zoo.rows.preprocessing.worker import Result


def cut(result: Result, limit: int) -> tuple[Result, int]:
    """Return the part of a unit up to the document that reaches the limit, and its tokens.

    Documents are in the order of the input. In modes that make rows, it is the row that reaches the
    limit, and streams of a unit follow each other.

    Args:
        result: Of a unit.
        limit: Number of tokens, > 0.
    """
    kept: dict[int, Packed] = {}
    total = 0
    last = _last_place(result, limit)
    for stream, packed in result.streams.items():
        encoded = packed.encoded
        if isinstance(encoded, Tokens):
            count = int(np.searchsorted(packed.places, last, "right"))
            stop = int(encoded.ends[count - 1]) if count else 0
            weights = None if encoded.weights is None else encoded.weights[:stop]
            encoded = Tokens(encoded.ids[:stop], encoded.ends[:count], weights)
            packed.stats.documents -= len(packed.places) - count
            total += stop
        else:
            count = _rows_until(encoded.lengths, limit - total)
            arrays = {name: rows[:count] for name, rows in encoded.arrays.items()}
            encoded = Rows(arrays, encoded.lengths[:count])
            total += int(encoded.lengths.sum())
        kept[stream] = packed._replace(encoded=encoded)
    return Result(result.number, kept), total


def _last_place(result: Result, limit: int) -> int:
    """Return the place in the unit of the document that reaches the limit, or of the last one."""
    places, sizes = [], []
    for packed in result.streams.values():
        if isinstance(packed.encoded, Tokens):
            places.append(packed.places)
            sizes.append(np.diff(packed.encoded.ends, prepend=0))
    if not places:
        return 0
    place, size = np.concatenate(places), np.concatenate(sizes)
    order = np.argsort(place)
    reached = int(np.searchsorted(np.cumsum(size[order]), limit))
    return int(place[order][min(reached, len(order) - 1)]) if len(order) else 0


def _rows_until(lengths: Array, limit: int) -> int:
    if limit <= 0:
        return 0
    return int(np.searchsorted(np.cumsum(lengths), limit)) + 1
