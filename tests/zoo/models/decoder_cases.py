"""Decoders for the tests of engines: what each new option of a layer is tried with."""

from typing import Any, Final

from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, GptJ

_GROUPED: Final = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
GEMMA2: Final[dict[str, Any]] = {
    **_GROUPED,
    "attention_inner_dim": 24,
    "attention_logit_softcapping": 2.0,
    "attention_sliding_window_length": 4,
    "embeddings_scale": 32**0.5,
    "final_logit_softcapping": 3.0,
    "layer_norm_epsilon": 1e-6,
    "nonlinearity": "geglu",
    "norm_first_sandwich": True,
    "norm_type": "rmsnorm",
    "position_embedding_type": "rotary",
    "rotary_dim": 6,
    "sliding_window_every_other_decoder_layer": True,
    "use_ffn_bias": False,
    "use_ffn_bias_in_attention": False,
    "use_projection_bias_in_attention": False,
}
_EXPERTS: Final = {"moe": {"num_experts": 3, "top_k": 2}}
CASES: Final[dict[str, tuple[type[Decoder], dict[str, Any]]]] = {
    "gpt2": (Gpt2, {}),
    "gptj": (GptJ, {"use_ffn_bias": True, "share_embedding_weights": False}),
    "gemma2": (Gpt2, GEMMA2),
    "qk norm": (
        Gpt2,
        {"attention_qk_norm": "rmsnorm", "position_embedding_type": "rotary", **_GROUPED},
    ),
    "qk norm, layernorm": (Gpt2, {"attention_qk_norm": "layernorm"}),
    "softcap, alibi": (
        Gpt2,
        {"attention_logit_softcapping": 2.0, "position_embedding_type": "alibi"},
    ),
    "experts, sandwich": (Gpt2, {"norm_first_sandwich": True, "norm_type": "rmsnorm", **_EXPERTS}),
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
