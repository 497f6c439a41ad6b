"""What settings and batches say about the keys that a query sees.

Dimension letters: B batch, T positions.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.visible import Visible, mask_of, whole

WindowPattern = Literal["full_attention_first", "sliding_window_first"]

SPAN_KEY = "attention_span"
POSITIONS_KEY = "position_ids"


def visible_keys(
    length: int,
    device: torch.device,
    *,
    window: int | None = None,
    spans: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor | None:
    """Return a mask of all pairs of positions, for models that take no rule.

    `window`, `spans` as `after`, `padding` (nonzero): see `Visible`, which is causal here.

    Shapes:
        spans, padding: (B, T). Returns: (1 or B, 1, T, T), bool; the last dimension is the key.
        None if these are all keys up to the query.

    Cost:
        No host read; whether the result is None depends on shapes only.
    """
    visible = Visible(window=window, after=spans, padding=None if padding is None else padding != 0)
    if visible.is_plain(length, length):
        return None
    seen = mask_of(visible, whole(length, length), length, device)
    return None if seen is None else seen[:, None]


def hidden_padding(mask: Tensor | None) -> Tensor | None:
    """Return which keys are hidden from all queries of their row: the padding.

    In a row that is all padding, nothing is hidden: attention over nothing would be NaN.

    `mask`: 0 for padding; None = there is none.

    Shapes:
        mask: (B, T). Returns: (B, T), bool.
    """
    if mask is None:
        return None
    padding = mask == 0
    return padding & ~padding.all(dim=-1, keepdim=True)


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
