"""Rows of tokens in batches of one shape, for all processes.

Dimension letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Batch = dict[str, Tensor]

PADDING: Final = -1
"""The index of a row that only fills a batch."""
_LEAST: Final = 64  # tokens: with compiled graphs, rows have few different lengths


class Batches(list[Batch]):
    """The batches of a validation; unlike a list, nothing keeps it alive."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Sequences of tokens of different lengths, in one array."""

    tokens: Ints
    lengths: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> RaggedRows:
        """Return rows of tokens."""
        flat = [token for row in rows for token in row]
        return cls(np.array(flat, np.int64), np.array([len(row) for row in rows], np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[Ints]:
        """Return the tokens of each row."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self) else []


def padded_length(length: int, limit: int, *, is_static: bool) -> int:
    """Return the length to which rows are padded: with compiled graphs one of few."""
    if not is_static:
        return length
    size = _LEAST
    while size < length:
        size *= 2
    return max(length, min(size, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How rows become batches.

    Args:
        batch_size: Rows per batch.
        num_shards: Number of data shards, which get equally many batches.
        room: Tokens to leave free after the longest row.
        limit: Maximum length.
        is_static: Whether each shape costs a compilation.
    """

    batch_size: int
    num_shards: int
    room: int
    limit: int
    is_static: bool


def make_batches(rows: RaggedRows, extra: dict[str, Ints], layout: BatchLayout) -> Batches:
    """Return batches of rows, longest first, padded on the right.

    Args:
        rows: The rows.
        extra: Further values of each row, by name.
        layout: The shape of the batches.

    Shapes:
        In a batch: `input_ids` (B, T) int64; `index` (B,), the number of the row or `PADDING`;
        `lengths` (B,); and `extra`.
    """
    batch_size, is_static = layout.batch_size, layout.is_static
    parts = rows.split()
    order = np.argsort(-rows.lengths, kind="stable")
    found = Batches()
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        index = np.concatenate([chosen, np.full(batch_size - len(chosen), PADDING)])
        filled = np.where(index == PADDING, chosen[0], index)
        if not is_static:
            index, filled = chosen, chosen
        length = int(rows.lengths[chosen[0]]) + layout.room
        length = padded_length(length, layout.limit, is_static=is_static)
        tokens = np.zeros((len(filled), length), np.int64)
        for number, row in enumerate(filled):
            tokens[number, : len(parts[row])] = parts[row]
        arrays = {"input_ids": tokens, "index": index, "lengths": rows.lengths[filled]}
        arrays |= {name: values[filled] for name, values in extra.items()}
        found.append({name: torch.from_numpy(value) for name, value in arrays.items()})
    while found and len(found) % layout.num_shards:
        last = found[-1]
        found.append({**last, "index": torch.full_like(last["index"], PADDING)})
    return found


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays of all processes, concatenated."""
    given = list(parts)
    return {name: np.concatenate([np.asarray(one[name]) for one in given]) for name in given[0]}
