"""The GPT-2 class of decoders: attention and feed-forward network one after the other."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from dataclasses import dataclass

from modelzoo_trainer.constraints import checked
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.decoder_settings import DecoderSettings


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class Gpt2Settings(DecoderSettings):
    """Settings of a decoder of the GPT-2 class; the defaults are those of the smallest GPT-2.

    Args:
        embedding_layer_norm: Whether embeddings are normalized.
    """

    embedding_layer_norm: bool = False


class Gpt2(Gpt2Settings, Decoder):
    """Decoder of the GPT-2 class: learned positions, LayerNorm, GELU and biases by default.

    GPT-3, Llama, Mistral and others are this class with other settings; no name changes a default.
    """

    SETTINGS = Gpt2Settings
