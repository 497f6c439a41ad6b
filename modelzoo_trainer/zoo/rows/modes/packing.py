"""From sequences of tokens to rows of a fixed length: one each, or several packed into a row.

Dimension letters: N rows, S columns of a row.

A sequence of n tokens takes n - 1 columns: its last token is only a label. So no label of a packed
row belongs to another sequence than its input.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from modelzoo_trainer.zoo.rows.hdf5_format import DATASET, FEATURES, VSL_FEATURES
from modelzoo_trainer.zoo.rows.interface import Array, Rows


class Weighted(NamedTuple):
    """Tokens of a sequence, and which of them count in the loss as labels."""

    ids: Array  # (n,) int32
    weights: Array  # (n,) int32


def single_rows(sequences: Sequence[Weighted], length: int, pad_id: int) -> Rows:
    """Return a row for each sequence; see `FEATURES`.

    Args:
        sequences: Each of 2 to `length` + 1 tokens.
        length: S.
        pad_id: Fills `input_ids` and `labels`; the mask has 0 there.

    Shapes:
        `data`: (N, 3, S) int32.
    """
    data = _empty(len(sequences), len(FEATURES), length, pad_id)
    for row, sequence in zip(data, sequences, strict=True):
        _fill(row, sequence, 0)
    columns = [len(sequence.ids) - 1 for sequence in sequences]
    return Rows({DATASET: data}, np.array(columns, np.int64))


def packed_rows(sequences: Sequence[Weighted], length: int, pad_id: int) -> Rows:
    """Return rows of several sequences that do not attend to each other; see `VSL_FEATURES`.

    Arguments are as for `single_rows`.

    Shapes:
        `data`: (N, 5, S) int32.
    """
    columns = [len(sequence.ids) - 1 for sequence in sequences]
    bins = pack(columns, length)
    data = _empty(len(bins), len(VSL_FEATURES), length, pad_id)
    for row, members in zip(data, bins, strict=True):
        row[3], row[4] = spans_and_positions([columns[index] for index in members], length)
        start = 0
        for index in members:
            start = _fill(row, sequences[index], start)
    used = [sum(columns[index] for index in members) for members in bins]
    return Rows({DATASET: data}, np.array(used, np.int64))


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return which items share a row: best fit, the largest items first.

    Rows are in the order of their first item, items of a row in the order given.

    Args:
        sizes: Of each item, at most `room`.
        room: Of a row.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free columns and index of each bin, sorted
    for index in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        place = bisect_left(free, (sizes[index], -1))
        if place == len(free):
            bins.append([])
            left, chosen = room, len(bins) - 1
        else:
            left, chosen = free.pop(place)
        bins[chosen].append(index)
        insort(free, (left - sizes[index], chosen))
    return sorted(sorted(members) for members in bins)


def spans_and_positions(sizes: Sequence[int], length: int) -> tuple[Array, Array]:
    """Return `attention_span` and `position_ids` of a row.

    The span of a token is how many later tokens of its sequence may attend to it. Both are 0 in
    padding.

    Args:
        sizes: Columns of the sequences of the row.
        length: S.

    Shapes:
        Returns: (S,) int32 each.
    """
    spans, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    start = 0
    for size in sizes:
        positions[start : start + size] = np.arange(size)
        spans[start : start + size] = np.arange(size)[::-1]
        start += size
    return spans, positions


def _empty(rows: int, features: int, length: int, pad_id: int) -> Array:
    data = np.zeros((rows, features, length), np.int32)
    data[:, 0] = data[:, 2] = pad_id
    return data


def _fill(row: Array, sequence: Weighted, start: int) -> int:
    stop = start + len(sequence.ids) - 1
    row[0, start:stop] = sequence.ids[:-1]
    row[1, start:stop] = sequence.weights[1:]
    row[2, start:stop] = sequence.ids[1:]
    return stop
