"""Which keys a query sees besides the causal rule: windows, sinks, packed sequences.

Dimension letters: B batch, T positions.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError

WindowPattern = Literal["full_attention_first", "sliding_window_first"]

SPAN_KEY = "attention_span"
POSITIONS_KEY = "position_ids"


def visible_keys(
    length: int,
    device: torch.device,
    *,
    window: int | None = None,
    sinks: int = 0,
    spans: Tensor | None = None,
    query: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor | None:
    """Return which keys each query sees, or None if these are all keys up to its own position.

    With distance = position of the query - position of the key, a query sees a key if
    0 <= distance and, of the following, what applies:

        window         distance < window
        window, sinks  distance < window, or the key is one of the first `sinks` ones
        spans          distance <= the span of the key
        padding        the key is no padding

    With `padding`, a query that would see nothing sees itself: attention over nothing would be NaN.

    Args:
        length: Number of positions T.
        device: The result's.
        window: Number of keys that a query sees, with its own; None = no window.
        sinks: Number of keys at the beginning that all later queries see.
        spans: For each key, the largest distance at which it is seen, >= 0. In a row of packed
            sequences of n tokens each, that is n - 1, ..., 0.
        query: The position of the only query, among T keys; None = every position is one.
        padding: Nonzero for keys that are padding; not with `query`.

    Shapes:
        spans: (B, T) integer. query: (1,). padding: (B, T). Returns: (1 or B, 1, T, T), bool; the
        last dimension is the key. With `query`: (1, 1, 1, T), never None.

    Cost:
        No host read; whether the result is None depends on shapes only.
    """
    if window is not None and length <= window + sinks:
        window = None
    if spans is None and window is None and query is None and padding is None:
        return None
    positions = torch.arange(length, device=device)
    distances = (positions if query is None else query)[:, None] - positions
    visible = (distances >= 0)[None, None]
    if window is not None:
        visible = visible & ((distances < window) | (positions < sinks))
    if spans is not None:
        visible = visible & (distances <= spans[:, None, None, :])
    if padding is not None:
        visible = visible & (padding == 0)[:, None, None, :]
        visible = visible | (~visible.any(dim=-1, keepdim=True) & (distances == 0))
    return visible


def unpadded_keys(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return which keys are seen by all queries of their row: those that are no padding.

    In a row that is all padding, everything is visible: attention over nothing would be NaN.

    `mask`: 0 for padding; None = there is none.

    Shapes:
        input_ids, mask: (B, T). Returns: (B, 1, 1, T), or (1, 1, 1, T) without a mask; bool.
    """
    if mask is None:
        size = (1, 1, 1, input_ids.shape[1])
        return torch.ones(size, dtype=torch.bool, device=input_ids.device)
    visible = mask != 0
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    return visible[:, None, None]


def merge_bias(
    bias: Tensor | None, visible: Tensor | None, length: int, device: torch.device
) -> Tensor | None:
    """Return one mask for `attend` from a bias of the scores and the visible keys.

    Shapes:
        bias: (N, T, T) floating. visible: (1 or B, 1, T, T), bool; None = causal.
        Returns: None, bool as `visible`, or floating (1 or B, N, T, T).
    """
    if bias is None:
        return visible
    if visible is None:
        visible = torch.ones((length, length), dtype=torch.bool, device=device).tril()
    return bias[None].masked_fill(~visible, float("-inf"))


def is_windowed(layer: int, *, every_other: bool, pattern: WindowPattern | None) -> bool:
    """Return whether a layer has the sliding window, if the model has one.

    `layer`: from 0. `every_other`: False = all layers have it. `pattern`: None =
    "full_attention_first".
    """
    return not every_other or (layer % 2 == 0) == (pattern == "sliding_window_first")


def check_batch(batch: Mapping[str, Tensor], *, has_window: bool, uses_positions: bool) -> None:
    """Check the keys and shapes of a batch that decide on attention, without reading values.

    `has_window`: whether the model has a sliding window. `uses_positions`: whether it adds or
    turns by the positions in the batch.

    Raises:
        ConfigError: If a key cannot be used with this model, or has another shape than the ids.
    """
    expected = tuple(batch["input_ids"].shape)
    for key in (SPAN_KEY, POSITIONS_KEY):
        if key in batch and tuple(batch[key].shape) != expected:
            raise ConfigError(
                f"The batch has {key} of the shape {tuple(batch[key].shape)}, but input_ids of the "
                f"shape {expected}: both must be (batch, tokens)."
            )
    if SPAN_KEY in batch and has_window:
        raise ConfigError(
            f"The batch has {SPAN_KEY} (packed sequences of several lengths), but the model has "
            f"attention_sliding_window_length: they cannot be combined. Set use_vsl: false in the "
            f"data processor, or remove attention_sliding_window_length."
        )
    if POSITIONS_KEY in batch and SPAN_KEY not in batch and not uses_positions:
        raise ConfigError(
            f"The batch has {POSITIONS_KEY}, but the model's position_embedding_type ignores them. "
            f"Use learned, fixed or rotary, or data without {POSITIONS_KEY}."
        )
