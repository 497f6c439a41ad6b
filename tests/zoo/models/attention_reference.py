"""Attention as nested loops over numbers, independent of torch's operators."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Sees = Callable[[int, int, int], bool]
"""Whether, in a row of the batch, a query sees a key: (row, query, key)."""
Bias = Callable[[int, int, int], float]
"""Bias of a score: (head, query, key)."""


def sees_all(row: int, query: int, key: int) -> bool:
    return True


def no_bias(head: int, query: int, key: int) -> float:
    return 0.0


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sees: Sees = sees_all,
    bias: Bias = no_bias,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention; `sees` and `bias` are asked for keys up to the query only.

    Shapes:
        queries: (B, N, T, D). keys, values: (B, G, T, D). Returns: as queries, float64.
    """
    num_rows, num_heads, length, _ = queries.shape
    num_groups = keys.shape[1]
    q, k, v = queries.tolist(), keys.tolist(), values.tolist()
    result = torch.zeros(queries.shape, dtype=torch.float64)
    for row in range(num_rows):
        for head in range(num_heads):
            group = head * num_groups // num_heads
            for query in range(length):
                seen = [key for key in range(query + 1) if sees(row, query, key)]
                weights = _softmax(
                    [
                        _capped(scale * _dot(q[row][head][query], k[row][group][key]), softcap)
                        + bias(head, query, key)
                        for key in seen
                    ]
                )
                columns = zip(*(v[row][group][key] for key in seen), strict=True)
                mixed = [_dot(weights, column) for column in columns]
                result[row, head, query] = torch.tensor(mixed, dtype=torch.float64)
    return result


def _dot(left: list[float], right: tuple[float, ...] | list[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _capped(score: float, softcap: float | None) -> float:
    return score if softcap is None else softcap * math.tanh(score / softcap)


def _softmax(scores: list[float]) -> list[float]:
    largest = max(scores)
    powers = [math.exp(score - largest) for score in scores]
    return [power / math.fsum(powers) for power in powers]
