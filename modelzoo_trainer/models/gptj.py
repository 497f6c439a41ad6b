"""The GPT-J class of decoders: attention and feed-forward network side by side."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.constraints import Fraction, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.decoder_layers import DecoderLayer
from modelzoo_trainer.models.decoder_settings import DecoderSettings
from modelzoo_trainer.models.initializers import InitializerSetting


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GptJSettings(DecoderSettings):
    """Settings of a decoder of the GPT-J class.

    Args:
        position_embedding_type: `learned`, `rotary`, or null for none.
        embedding_dropout_rate: Dropout of embeddings; null = `dropout_rate`.
        residual_dropout_rate: Another name of `dropout_rate`.
        use_ffn_bias: Whether the feed-forward layers have biases.
        use_untied_layer_norm: Whether the feed-forward network of a layer has a normalization of
            its own; default: it shares that of attention.
        attention_initializer: Another name of `initializer`.
        output_layer_initializer: Of the output projection of attention, and of the feed-forward
            layers unless they have their own; default: the default initializer.
        ffn_initializer: Of the input projections of feed-forward layers; default:
            `output_layer_initializer`.
        ffn_output_layer_initializer: Of their output projections; default:
            `output_layer_initializer`. muP scales none of the initializers that are given, only the
            default one; that of both output projections then also by (2 * layers) ** -0.5.
        scale_qk_dot_by_d: Whether to divide scaled products by the head dimension instead of its
            root; muP does not change it.
    """

    position_embedding_type: Literal["learned", "rotary"] | None = "rotary"
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
        if self.pos_scaling_type == "llama3":
            raise ConfigError(
                "pos_scaling_type is 'llama3', which the decoders gptj, gpt-neox and falcon do not "
                "have. Use another one, or a decoder of the GPT-2 class."
            )


class ParallelLayer(DecoderLayer):
    """Attention and a feed-forward network on the same normalized states.

    h = h + attention(norm(h)) + ffn(norm(h)); one normalization, or each its own.
    """

    def __init__(self, settings: GptJSettings) -> None:
        super().__init__(settings)
        self.has_shared_norm = not settings.use_untied_layer_norm
        if self.has_shared_norm:
            del self.ffn_norm

    @override
    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        normed = self.attention_norm(hidden)
        attended = self.dropout(self.attention(normed, angles))
        if not self.has_shared_norm:
            normed = self.ffn_norm(hidden)
        output: Tensor = hidden + attended + self.dropout(self.ffn(normed))
        return output


class GptJ(GptJSettings, Decoder):
    """Decoder of the GPT-J class: rotary positions, LayerNorm and GELU by default.

    GPT-NeoX and Falcon are this class with other settings; no name changes a default.
    """

    SETTINGS = GptJSettings

    @override
    def _make_layer(self) -> ParallelLayer:
        return ParallelLayer(self)
