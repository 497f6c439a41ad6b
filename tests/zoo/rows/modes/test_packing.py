"""Rows of sequences: one each, or several packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.zoo.rows.modes.packing import (
    Weighted,
    pack,
    packed_rows,
    single_rows,
    spans_and_positions,
)


def weighted(ids, weights=None):
    weights = [1] * len(ids) if weights is None else weights
    return Weighted(np.array(ids, np.int32), np.array(weights, np.int32))


def test_the_last_token_of_a_sequence_is_only_a_label():
    rows = single_rows([weighted([5, 6, 7], [0, 0, 1])], 4, 9)
    assert rows.arrays["data"].tolist() == [[[5, 6, 9, 9], [0, 1, 0, 0], [6, 7, 9, 9]]]
    assert rows.lengths.tolist() == [2]


def test_spans_count_down_to_the_end_of_each_sequence():
    spans, positions = spans_and_positions([4, 3], 8)
    assert spans.tolist() == [3, 2, 1, 0, 2, 1, 0, 0]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]


def test_packed_sequences_have_no_label_of_their_neighbours():
    rows = packed_rows(
        [weighted([10, 11, 12, 13, 14]), weighted([20, 21, 22, 23], [0, 0, 1, 1])], 8, 9
    )
    assert rows.arrays["data"].tolist() == [
        [
            [10, 11, 12, 13, 20, 21, 22, 9],
            [1, 1, 1, 1, 0, 1, 1, 0],
            [11, 12, 13, 14, 21, 22, 23, 9],
            [3, 2, 1, 0, 2, 1, 0, 0],
            [0, 1, 2, 3, 0, 1, 2, 0],
        ]
    ]
    assert rows.lengths.tolist() == [7]


def test_no_sequences_are_no_rows():
    assert packed_rows([], 8, 0).arrays["data"].shape == (0, 5, 8)
    assert single_rows([], 8, 0).arrays["data"].shape == (0, 3, 8)


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ([5, 3, 4, 2], [[0, 1], [2, 3]]),
        ([8, 1, 8], [[0], [1], [2]]),
        ([2, 6, 2, 6], [[0, 1], [2, 3]]),
        ([], []),
    ],
)
def test_large_items_find_small_ones_that_fit(sizes, bins):
    assert pack(sizes, 8) == bins


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 16), max_size=40))
def test_every_item_is_in_one_row_and_no_row_is_too_full(sizes):
    bins = pack(sizes, 16)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in members) <= 16 for members in bins)
    used = sorted(sum(sizes[index] for index in members) for members in bins)
    assert len(used) < 2 or used[0] + used[1] > 16


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 8), max_size=20))
def test_packed_rows_keep_every_pair_of_a_token_and_its_label(sizes):
    counter = iter(range(1, 1000))
    sequences = [weighted([next(counter) for _ in range(size + 1)]) for size in sizes]
    data = packed_rows(sequences, 8, 0).arrays["data"]
    found = {(int(i), int(t)) for row in data for i, m, t in row[:3].T if m}
    pairs = {
        (int(first), int(second))
        for one in sequences
        for first, second in zip(one.ids[:-1], one.ids[1:], strict=True)
    }
    assert found == pairs
    assert int(data[:, 1].sum()) == len(pairs)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 16))
def test_a_token_sees_only_its_own_sequence(sizes):
    spans, positions = spans_and_positions(sizes, 16)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    query, key = np.arange(len(owners))[:, None], np.arange(len(owners))[None]
    distance = query - key
    sees = (distance >= 0) & (distance <= spans[None, : len(owners)])
    assert (sees == ((distance >= 0) & (owners[:, None] == owners[None]))).all()
    both = (distance >= -positions[None, : len(owners)]) & (distance <= spans[None, : len(owners)])
    assert (both == (owners[:, None] == owners[None])).all()
