"""The GPT-2 class of decoders: attention and feed-forward network one after the other."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    NonNegativeSize,
    PositiveFloat,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.feed_forward import NormType
from modelzoo_trainer.zoo.models.masks import WindowPattern


@checked_dataclass(kw_only=True)
class Gpt2Settings(DecoderSettings):
    """Settings of a decoder of the GPT-2 class; the defaults are the smallest GPT-2's.

    Args:
        embedding_layer_norm: Whether embeddings are normalized.
        output_logits_scale: Without muP, factor on the logits; null = 1.
        alibi_trainable_slopes: Whether the slopes of `alibi` are trained, from random values.
        attention_inner_dim: Sum of the sizes of all heads, a multiple of `num_heads`; default:
            `hidden_size`.
        attention_logit_softcapping: Bound c of the scores of attention, > 0: c * tanh(scores / c),
            before biases of positions and masks.
        attention_qk_norm: Type of a normalization of the queries and keys of each head, before they
            are rotated, as `rmsnorm` of Qwen3; null = none. Not a published key: the published
            `attention_qk_norm_layer` has no effect.
        final_logit_softcapping: The same bound of the logits.
        norm_first_sandwich: Whether the outputs of attention and of the feed-forward network are
            normalized too, before they are added.
        position_embedding_offset: For `learned`: row of the first position in the table, which has
            that many rows more; `position_ids` of a batch are used without it.
        scale_qk_dot_by_layer_idx: Whether products of layer i, from 0, are divided by i + 1.
        sliding_window_every_other_decoder_layer: Whether only every other layer has the sliding
            window.
        sliding_window_every_other_decoder_layer_pattern: Kind of the first layer; null =
            `full_attention_first`.
    """

    embedding_layer_norm: bool = False
    output_logits_scale: PositiveFloat | None = None
    alibi_trainable_slopes: bool = False
    attention_inner_dim: Size | None = None
    attention_logit_softcapping: FinitePositiveFloat | None = None
    attention_qk_norm: NormType | None = None
    final_logit_softcapping: FinitePositiveFloat | None = None
    norm_first_sandwich: bool = False
    position_embedding_offset: NonNegativeSize = 0
    scale_qk_dot_by_layer_idx: bool = False
    sliding_window_every_other_decoder_layer: bool = False
    sliding_window_every_other_decoder_layer_pattern: WindowPattern | None = None


class Gpt2(Gpt2Settings, Decoder):
    """Decoder of the GPT-2 class: learned positions, LayerNorm, GELU and biases by default.

    GPT-3, Llama, Mixtral and others are this class with other settings; no name changes a default.
    """

    SETTINGS = Gpt2Settings
