"""Decoders by their published names: `gpt2`, `gpt3`, `llama`."""

from dataclasses import dataclass
from typing import Literal

from modelzoo_trainer.constraints import Count, Fraction, Size, checked
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.feed_forward import Nonlinearity, NormType


class Gpt2(Decoder):
    """Decoder with the defaults of the smallest GPT-2: learned positions, LayerNorm, GELU.

    The arguments are documented in `DecoderSettings`.
    """


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class Llama(Decoder):
    """Decoder with the defaults of Llama: rotary positions, RMSNorm, SwiGLU, no biases.

    The arguments are documented in `DecoderSettings`. The sizes are those of Llama 2 7B. Published
    Llamas also have `rotary_dim` equal to the head dimension and `attention_dropout_rate: 0`;
    these are not defaults here, so that an omitted setting means the same as in the Model Zoo.
    """

    vocab_size: Size = 32000
    hidden_size: Size = 4096
    max_position_embeddings: Size = 4096
    position_embedding_type: Literal["learned", "rotary"] | None = "rotary"
    share_embedding_weights: bool = False
    num_hidden_layers: Count = 32
    norm_type: NormType = "rmsnorm"
    dropout_rate: Fraction = 0.0
    num_heads: Size = 32
    use_projection_bias_in_attention: bool = False
    use_ffn_bias_in_attention: bool = False
    filter_size: Size = 11008
    nonlinearity: Nonlinearity = "swiglu"
    use_ffn_bias: bool = False
