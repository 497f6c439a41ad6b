"""What all layers of a decoder share in one forward pass: angles, masks, positions.

Dimension letters: B batch, T positions, N heads, R rotary dimensions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache
from modelzoo_trainer.zoo.models.masks import is_windowed, merge_bias, visible_keys
from modelzoo_trainer.zoo.models.position_bias import AlibiBias, RelativeBias


class Context(NamedTuple):
    """Made once per forward pass, outside compiled and recomputed blocks.

    Shapes:
        angles: twice (T, R) or (B, 1, T, R), float32. masks: as of `attend`. token_ids, counted:
        (B, T) integer. position: (1,).
    """

    angles: tuple[Tensor, Tensor] | None  # cosines and sines of rotary positions
    masks: tuple[Tensor | None, Tensor | None]  # of layers without and with the sliding window
    token_ids: Tensor | None = None  # for the router of experts
    counted: Tensor | None = None  # nonzero where a token counts for the statistics of routing
    cache: KeyValueCache | None = None  # of this layer, to generate tokens
    position: Tensor | None = None  # with a cache: of the one new token; None = the first tokens


def make_position_bias(settings: DecoderSettings) -> AlibiBias | RelativeBias | None:
    """Return the module with the bias of the scores, if positions are one."""
    if settings.position_embedding_type == "alibi":
        return AlibiBias(
            settings.num_heads,
            scaling_factor=settings.pos_scaling_factor,
            trainable=settings.alibi_trainable_slopes,
        )
    if settings.position_embedding_type == "relative":
        return RelativeBias(settings.num_heads, settings.num_buckets)
    return None


def windowed_layers(settings: DecoderSettings) -> list[bool]:
    """Return, for each layer, whether it has the sliding window."""
    if settings.attention_sliding_window_length is None:
        return [False] * settings.num_hidden_layers
    return [
        is_windowed(
            layer,
            every_other=settings.sliding_window_every_other_decoder_layer,
            pattern=settings.sliding_window_every_other_decoder_layer_pattern,
        )
        for layer in range(settings.num_hidden_layers)
    ]


def make_masks(
    settings: DecoderSettings,
    position_bias: nn.Module | None,
    hidden: Tensor,
    spans: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the masks of layers without and with the sliding window; unused ones are None.

    `hidden`: states that the first layer gets. `spans`: `attention_span` of the batch. `padding`:
    nonzero for keys that are padding.

    Shapes:
        hidden: (B, T, H). spans: (B, T) integer. padding: (B, T). Returns: as `Context.masks`.
    """
    length, device = hidden.shape[1], hidden.device
    bias = None if position_bias is None else position_bias(length, device)
    bias = in_score_dtype(bias, settings, hidden)
    layers = windowed_layers(settings)
    full = windowed = None
    if not all(layers):
        visible = visible_keys(length, device, spans=spans, padding=padding)
        full = merge_bias(bias, visible, length, device)
    if any(layers):
        visible = visible_keys(length, device, padding=padding, **_window(settings))
        is_the_same = visible is None and full is not None
        windowed = full if is_the_same else merge_bias(bias, visible, length, device)
    return full, windowed


def make_step_masks(
    settings: DecoderSettings,
    position_bias: nn.Module | None,
    hidden: Tensor,
    length: int,
    position: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the masks of one new token over a cache of `length` keys; never causal.

    Shapes:
        hidden: (B, 1, H). position: (1,). Returns: each (1, 1 or N, 1, length).
    """
    device = hidden.device
    bias = None if position_bias is None else position_bias(length, device, position)
    bias = in_score_dtype(bias, settings, hidden)
    full = visible_keys(length, device, query=position)
    windowed = visible_keys(length, device, query=position, **_window(settings))
    return (
        merge_bias(bias, full, length, device),
        merge_bias(bias, windowed, length, device),
    )


def _window(settings: DecoderSettings) -> dict[str, Any]:
    return {
        "window": settings.attention_sliding_window_length,
        "sinks": settings.attention_sink_tokens or 0,
    }


def in_score_dtype(bias: Tensor | None, settings: DecoderSettings, hidden: Tensor) -> Tensor | None:
    """Convert the bias once, not in every layer; scores with a softcap are float32."""
    if bias is None or settings.attention_logit_softcapping is not None:
        return bias
    return bias.to(score_dtype(hidden))


def score_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which attention computes with these states."""
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
