"""Settings that make a decoder a Llama, for tests; its sizes are those of the test."""

from typing import Any, Final

LLAMA: Final[dict[str, Any]] = {
    "position_embedding_type": "rotary",
    "share_embedding_weights": False,
    "norm_type": "rmsnorm",
    "dropout_rate": 0.0,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "nonlinearity": "swiglu",
    "use_ffn_bias": False,
}
