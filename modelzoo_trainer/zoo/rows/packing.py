"""Cut tokens of consecutive documents into rows, and fill the last row of all.

Dimension letters: N rows, S columns of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from modelzoo_trainer.zoo.rows.hdf5_format import DATASET
from modelzoo_trainer.zoo.rows.interface import Array, Rows, Tokens


class Carry(NamedTuple):
    """Tokens that do not fill a row yet."""

    ids: Array  # (n,) int32, n <= S
    weights: Array  # (n,) int32


class Packer:
    """Cuts a stream of tokens into rows of S + 1 tokens that overlap by one: nothing is lost.

    Args:
        length: S.
        pad_id: Fills the last row.
        min_length: A last row with fewer tokens is dropped.
    """

    def __init__(self, length: int, pad_id: int, min_length: int) -> None:
        self._length = length
        self._pad_id = pad_id
        self._min_length = min_length
        self.carry = Carry(np.empty(0, np.int32), np.empty(0, np.int32))

    def add(self, tokens: Tokens) -> Rows:
        """Return the rows that are full with these tokens.

        Shapes:
            `data`: (N, 3, S) int32: input_ids, attention_mask (of the loss), labels.
        """
        weights = np.ones_like(tokens.ids) if tokens.weights is None else tokens.weights
        ids = np.concatenate((self.carry.ids, tokens.ids))
        weights = np.concatenate((self.carry.weights, weights))
        num_rows = max(0, (len(ids) - 1) // self._length)
        stop = num_rows * self._length
        self.carry = Carry(ids[stop:].copy(), weights[stop:].copy())
        data = np.empty((num_rows, 3, self._length), np.int32)
        for feature, values in enumerate((ids[:stop], weights[1 : stop + 1], ids[1 : stop + 1])):
            data[:, feature] = values.reshape(num_rows, self._length)
        return Rows({DATASET: data}, np.full(num_rows, self._length, np.int64))

    def finish(self) -> tuple[Rows, int]:
        """Return the last, padded row, if there is one, and the number of tokens dropped.

        The first of the carried tokens was the last label of the row before.
        """
        ids, weights = self.carry
        num_columns = len(ids) - 1
        self.carry = Carry(ids[:0], weights[:0])
        if num_columns < max(1, self._min_length):
            rows = Rows({DATASET: np.empty((0, 3, self._length), np.int32)}, np.empty(0, np.int64))
            return rows, max(0, num_columns)
        data = np.zeros((1, 3, self._length), np.int32)
        data[:, (0, 2)] = self._pad_id
        data[0, 0, :num_columns] = ids[:-1]
        data[0, 1, :num_columns] = weights[1:]
        data[0, 2, :num_columns] = ids[1:]
        return Rows({DATASET: data}, np.array([num_columns], np.int64)), 0
