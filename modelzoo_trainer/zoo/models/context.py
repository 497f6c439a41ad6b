"""What all layers of a decoder share in one forward pass: angles, visible keys, positions.

Dimension letters: B batch, T positions, R rotary dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelzoo_trainer.base.devices import ContextParallel
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache
from modelzoo_trainer.zoo.models.masks import is_windowed
from modelzoo_trainer.zoo.models.position_bias import AlibiBias, RelativeBias
from modelzoo_trainer.zoo.models.visible import Visible


class Context(NamedTuple):
    """Made once per forward pass, outside compiled and recomputed blocks.

    Shapes:
        angles: twice (T, R) or (B, 1, T, R), float32. token_ids, counted: (B, T) integer.
        position: (1,). places: (T,).
    """

    angles: tuple[Tensor, Tensor] | None  # cosines and sines of rotary positions
    visible: tuple[Visible, Visible]  # of layers without and with the sliding window
    token_ids: Tensor | None = None  # for the router of experts
    counted: Tensor | None = None  # nonzero where a token counts for the statistics of routing
    cache: KeyValueCache | None = None  # of this layer, to generate tokens
    position: Tensor | None = None  # with a cache: of the one new token; None = the first tokens
    parallel: ContextParallel | None = None  # the processes that split the rows; None = this alone
    places: Tensor | None = None  # of this process's tokens in their rows; None = 0, 1, ...


def make_position_bias(
    settings: DecoderSettings, *, two_sided: bool = False
) -> AlibiBias | RelativeBias | None:
    """Return the module with the bias of the scores, if positions are one.

    `two_sided`: whether later keys are seen as well; for `alibi`.
    """
    if settings.position_embedding_type == "alibi":
        return AlibiBias(
            settings.num_heads,
            scaling_factor=settings.pos_scaling_factor,
            trainable=settings.alibi_trainable_slopes,
            two_sided=two_sided,
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


def make_visible(
    settings: DecoderSettings,
    position_bias: nn.Module | None,
    length: int,
    device: torch.device,
    *,
    spans: Tensor | None = None,
    padding: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Visible, Visible]:
    """Return what is seen in layers without and with the sliding window.

    Args:
        settings: Of the decoder.
        position_bias: Its module, if it has one.
        length: Number of keys T.
        device: Of the states.
        spans: `attention_span` of the batch.
        padding: Nonzero for keys that are padding.
        position: Of the only query, among `length` keys in a cache; None = every position is one.

    Shapes:
        spans: (B, T) integer. padding: (B, T). position: (1,) integer.
    """
    full = Visible(
        after=spans,
        padding=None if padding is None else padding != 0,
        bias=None if position_bias is None else position_bias(length, device),
        position=position,
    )
    windowed = full._replace(
        after=None,  # refused with a window, see `check_batch`
        window=settings.attention_sliding_window_length,
        sinks=settings.attention_sink_tokens or 0,
    )
    return full, windowed
