"""Decoders for the tests of engines: what each new option of a layer is tried with."""

from typing import Any, Final

from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.decoder_names import Gpt2, GptJ

_GROUPED: Final = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
CASES: Final[dict[str, tuple[type[Decoder], dict[str, Any]]]] = {
    "gpt2": (Gpt2, {}),
    "gptj": (GptJ, {"use_ffn_bias": True, "share_embedding_weights": False}),
    "falcon": (GptJ, {"use_untied_layer_norm": True, "rotary_dim": 8, **_GROUPED}),
}
"""Class and settings by the name of a test; sizes: heads of 8, 4 of them."""
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 51,
    "hidden_size": 32,
    "max_position_embeddings": 12,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
}
NO_DROPOUT: Final[dict[str, Any]] = {
    "dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
