"""Rows overlap by one token: nothing is lost, and every token is predicted once."""

from __future__ import annotations

import numpy as np

from modelzoo_trainer.zoo.rows.interface import Tokens
from modelzoo_trainer.zoo.rows.packing import Packer


def tokens(*ids: int, weights=None) -> Tokens:
    given = None if weights is None else np.array(weights, np.int32)
    return Tokens(np.array(ids, np.int32), np.array([len(ids)]), given)


def test_rows_are_cut_every_length_and_share_a_token() -> None:
    packer = Packer(4, 0, 1)
    assert len(packer.add(tokens(1, 2, 3, 4)).lengths) == 0
    rows = packer.add(tokens(5, 6, 7, 8, 9, 10))
    assert rows.arrays["data"].tolist() == [
        [[1, 2, 3, 4], [1] * 4, [2, 3, 4, 5]],
        [[5, 6, 7, 8], [1] * 4, [6, 7, 8, 9]],
    ]
    last, dropped = packer.finish()
    assert last.arrays["data"].tolist() == [[[9, 0, 0, 0], [1, 0, 0, 0], [10, 0, 0, 0]]]
    assert (last.lengths.tolist(), dropped) == ([1], 0)


def test_the_mask_has_the_weight_of_the_label() -> None:
    rows = Packer(2, 0, 1).add(tokens(1, 2, 3, 4, 5, weights=[0, 0, 1, 1, 0]))
    assert rows.arrays["data"][:, 1].tolist() == [[0, 1], [1, 0]]


def test_a_short_end_is_dropped_and_counted() -> None:
    packer = Packer(4, 0, 3)
    packer.add(tokens(1, 2, 3))
    last, dropped = packer.finish()
    assert (len(last.lengths), dropped) == (0, 2)


def test_nothing_is_left_where_a_row_ends_exactly() -> None:
    packer = Packer(2, 0, 1)
    packer.add(tokens(1, 2, 3))
    last, dropped = packer.finish()
    assert (len(last.lengths), dropped) == (0, 0)
    assert len(Packer(2, 0, 1).finish()[0].lengths) == 0
