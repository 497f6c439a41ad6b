"""Diffusion transformers for the tests of engines: what each option is tried with."""

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.vision.dit import Dit

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
    "latent_size": [4, 6],
    "latent_channels": 3,
    "patch_size": [2, 3],
    "num_classes": 5,
    "num_diffusion_steps": 50,
    "frequency_embedding_size": 8,
    "embedding_dropout_rate": 0.0,
}
# What starts at 0 is not 0 in these tests: else most gradients were 0.
TRAINED: Final[dict[str, Any]] = {"head_initializer": {"name": "normal", "std": 0.2}}
CASES: Final[dict[str, dict[str, Any]]] = {
    "dit": {"position_embedding_type": "fixed", "use_conv_patchified_embedding": True},
    "linear, learned": {"use_conv_transpose_unpatchify": False},
    "gated, no label of no class": {
        "nonlinearity": "swiglu",
        "label_dropout_rate": 0.0,
        "position_embedding_type": None,
        "use_ffn_bias": False,
        "use_projection_bias_in_attention": False,
    },
}


def batch_of(size: int = 4) -> dict[str, Tensor]:
    """Return a batch as of the data processor."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, size, SIZES["latent_channels"], *SIZES["latent_size"])
    latents, noise = torch.randn(shape, generator=generator)
    return {
        "input": latents,
        "label": torch.arange(size, dtype=torch.int32) % 5,
        "diffusion_noise": noise,
        "timestep": torch.arange(size, dtype=torch.int32) * 49 // max(1, size - 1),
    }


def make(case: str, **changes: Any) -> Dit:
    """Return the model of a case, with random modulations instead of 0."""
    torch.manual_seed(3)
    return drawn(Dit(**{**SIZES, **TRAINED, **CASES[case], **changes}))


def drawn(model: Dit) -> Dit:
    """Draw gates, scales and shifts, which start at 0."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "_gate" in name or ".scale" in name or ".shift" in name:
                param.normal_(std=0.2)
    return model
