"""Decoders that see images for tests: small models and batches."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.multimodal.llava import Llava
from modelzoo_trainer.zoo.models.multimodal.simple import MultimodalSimple
from tests.zoo.models.llama_settings import LLAMA

VOCAB, LENGTH, PATCHES, WIDTH = 61, 24, 4, 32
HOLDER: Final = 7  # the token of placeholders
IMAGE: Final[dict[str, Any]] = {
    "name": "ViTModel",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "filter_size": 32,
    "image_size": [8, 8],
    "patch_size": [4, 4],
    "nonlinearity": "quick_gelu",
    "use_post_embed_layer_norm": True,
    "use_embed_proj_bias": False,
    "use_conv_patchified_embedding": True,
    "dropout_rate": 0.0,
}
TEXT: Final[dict[str, Any]] = {
    **LLAMA,
    "name": "llama",
    "rotary_dim": 8,
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_heads": 4,
    "filter_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "attention_dropout_rate": 0.0,
}
LAYERS: Final[dict[str, Any]] = {
    "name": "FeedForwardNetwork",
    "input_unit": 16,
    "layers_units": [WIDTH, WIDTH],
    "layers_activation": ["gelu", None],
    "use_bias": True,
}
LLAVA: Final[dict[str, Any]] = {
    "image_model": IMAGE,
    "text_model": TEXT,
    "projector": {"image_model": LAYERS},
    "image_feature_select_layer_idx": -2,
}
SIMPLE: Final[dict[str, Any]] = {
    "image_model_list": {
        "image_models": [{"image_encoder": {**IMAGE, "image_layer_idx": -2}}],
        "global_image_projection": LAYERS,
    },
    "text_model": TEXT,
}


def make(**changes: Any) -> Llava:
    """Return a model; a change of `image_model` or `text_model` is added to its settings."""
    torch.manual_seed(3)
    parts = {
        name: {**LLAVA[name], **changes.pop(name, {})} for name in ("image_model", "text_model")
    }
    return Llava(**{**LLAVA, **changes, **parts})


def make_simple(**changes: Any) -> MultimodalSimple:
    """Return a model of several images."""
    torch.manual_seed(3)
    return MultimodalSimple(**{**SIMPLE, **changes})


def batch_of(num: int = 3, length: int = LENGTH, start: int = 1) -> dict[str, Tensor]:
    """Return a batch whose last four positions are padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, VOCAB, (num, length + 1), generator=generator, dtype=torch.int32)
    tokens[:, start : start + PATCHES] = HOLDER
    mask = torch.ones(num, length, dtype=torch.int32)
    mask[:, : start + PATCHES - 1] = 0
    mask[:, -5:] = 0
    padding = torch.zeros(num, length, dtype=torch.int32)
    padding[:, -4:] = 1
    return {
        "image_data": torch.randn(num, 3, 8, 8, generator=generator),
        "text_input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "key_padding_mask": padding,
    }


def simple_batch(num: int = 3) -> dict[str, Tensor]:
    """Return a batch of rows with two images, of which the last row has only the first one."""
    batch = batch_of(num)
    generator = torch.Generator().manual_seed(2)
    batch["image_data"] = torch.randn(num, 2, 3, 8, 8, generator=generator)
    places = torch.stack((torch.arange(1, 5), torch.arange(9, 13))).repeat(num, 1, 1)
    places[-1, 1] = LENGTH
    batch["image_data_loc"] = places.to(torch.int32)
    batch["token_modality_idx"] = torch.zeros_like(batch["labels"])
    return batch
