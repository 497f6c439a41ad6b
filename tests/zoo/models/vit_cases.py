"""Vision transformers for the tests of engines: what each option is tried with."""

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.vision.classifier import Vit

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
    "image_size": [8, 12],
    "patch_size": [4, 2],
    "num_classes": 5,
}
NO_DROPOUT: Final[dict[str, Any]] = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
CASES: Final[dict[str, dict[str, Any]]] = {
    "vit": {},
    "conv, pooler": {
        "use_conv_patchified_embedding": True,
        "use_encoder_pooler_layer": True,
        "pooler_nonlinearity": "tanh",
    },
    "post-norm, gated, fixed": {
        "norm_first": False,
        "nonlinearity": "swiglu",
        "position_embedding_type": "fixed",
        "use_post_embed_layer_norm": True,
    },
    "dino": {"layerscale_value": 0.5, "use_dinov2_classifier": True, "use_bias_in_output": True},
    "stochastic depth": {"stochastic_depth_drop_prob": 0.5, "stochastic_depth_mode": "row"},
}


def batch_of(size: int = 4) -> tuple[Tensor, Tensor]:
    """Return images and labels."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 8, 12, generator=generator), torch.arange(size) % 5


def make(case: str, **changes: Any) -> Vit:
    """Return the model of a case."""
    torch.manual_seed(3)
    return Vit(**{**SIZES, **CASES[case], **changes})
