"""GPT-2 and GPT-3: `gpt2`, `gpt3`."""

from modelzoo_trainer.models.decoder import Decoder


class Gpt2(Decoder):
    """A decoder with the defaults of the smallest GPT-2: learned positions, LayerNorm, GELU.

    The arguments are described in `DecoderSettings`.
    """
