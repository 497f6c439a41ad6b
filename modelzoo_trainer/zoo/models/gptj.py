"""The GPT-J class of decoders: attention and feed-forward network side by side."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_layers import DecoderLayer, LayerOutput
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings, PositionEmbedding
from modelzoo_trainer.zoo.models.initializers import InitializerSetting


@checked_dataclass(kw_only=True)
class GptJSettings(DecoderSettings):
    """Settings of a decoder of the GPT-J class.

    Args:
        position_embedding_type: `learned` or `fixed` (sinusoidal) embeddings, `rotary`, `relative`
            (T5's bias of the scores), or null for none.
        num_relative_attention_buckets: For `relative`: number of buckets of distances, 2 to 255;
            null = 32.
        attention_sink_tokens: With a sliding window: number of keys at the beginning that all
            later queries see.
        embedding_dropout_rate: Dropout of embeddings; null = `dropout_rate`.
        residual_dropout_rate: Another name of `dropout_rate`.
        use_ffn_bias: Whether the feed-forward layers have biases.
        use_untied_layer_norm: Whether the feed-forward network of a layer has a normalization of
            its own; default: it shares attention's.
        attention_initializer: Another name of `initializer`.
        output_layer_initializer: Of the output projection of attention, and of the feed-forward
            layers unless they have their own; default: the default initializer.
        ffn_initializer: Of the input projections of feed-forward layers; default:
            `output_layer_initializer`.
        ffn_output_layer_initializer: Of their output projections; default:
            `output_layer_initializer`. muP scales none of the initializers that are given, only the
            default one; the initializer of both output projections then also by (2 * layers) **
            -0.5.
        scale_qk_dot_by_d: Whether to divide scaled products by the head dimension instead of its
            root; muP does not change it.
    """

    position_embedding_type: PositionEmbedding | None = "rotary"
    num_relative_attention_buckets: Size | None = None
    attention_sink_tokens: Size | None = None
    embedding_dropout_rate: Fraction | None = 0.1
    residual_dropout_rate: Fraction | None = None
    use_ffn_bias: bool = False
    use_untied_layer_norm: bool = False
    attention_initializer: InitializerSetting | None = None
    output_layer_initializer: InitializerSetting | None = None
    ffn_initializer: InitializerSetting | None = None
    ffn_output_layer_initializer: InitializerSetting | None = None
    scale_qk_dot_by_d: bool = False

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **DecoderSettings.ALIASES,
            "residual_dropout_rate": "dropout_rate",
            "attention_initializer": "initializer",
        }
    )
    initializer_rules: ClassVar[Literal["gpt2", "gptj"]] = "gptj"

    @override
    def _check(self) -> None:
        super()._check()
        if self.position_embedding_type == "alibi":
            raise ConfigError(
                "position_embedding_type is 'alibi', which the decoders gptj, gpt-neox and falcon "
                "do not have. Use another one, or a decoder of the GPT-2 class."
            )
        if self.attention_sink_tokens is not None and self.attention_sliding_window_length is None:
            raise ConfigError(
                f"attention_sink_tokens ({self.attention_sink_tokens}) requires "
                f"attention_sliding_window_length: without a window, all keys stay visible. Set "
                f"it, or remove attention_sink_tokens."
            )
        if self.pos_scaling_type == "llama3":
            raise ConfigError(
                "pos_scaling_type is 'llama3', which the decoders gptj, gpt-neox and falcon do not "
                "have. Use another one, or a decoder of the GPT-2 class."
            )


class ParallelLayer(DecoderLayer):
    """Attention and a feed-forward network on the same normalized states.

    h = h + attention(norm(h)) + ffn(norm(h)); one normalization, or each its own.
    """

    def __init__(self, settings: GptJSettings, *, is_windowed: bool = False) -> None:
        super().__init__(settings, is_windowed=is_windowed)
        self.has_shared_norm = not settings.use_untied_layer_norm
        if self.has_shared_norm:
            del self.ffn_norm

    @override
    def forward(
        self, hidden: Tensor, context: Context, factor: Tensor | None = None
    ) -> LayerOutput:
        normed = self.attention_norm(hidden)
        attended = self.dropout(self.attention(normed, context, factor))
        if not self.has_shared_norm:
            normed = self.ffn_norm(hidden)
        return self.add_ffn(hidden + attended, normed, context)


class GptJ(GptJSettings, Decoder):
    """Decoder of the GPT-J class: rotary positions, LayerNorm and GELU by default.

    GPT-NeoX and Falcon are this class with other settings; no name changes a default.
    """

    SETTINGS = GptJSettings

    @override
    def _make_layer(self, *, is_windowed: bool) -> ParallelLayer:
        return ParallelLayer(self, is_windowed=is_windowed)
