"""Outputs and gradients are those of transformers, with the same weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.vision.classifier import Vit
from modelzoo_trainer.zoo.models.vision.encoder import VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings
from tests.zoo.models.vit_cases import NO_DROPOUT, SIZES

pytestmark = pytest.mark.slow

IMAGE, PATCH = 8, 4
THEIR_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "attn_implementation": "sdpa",  # "eager" has its softmax in float32
}
OURS: dict[str, Any] = {
    **SIZES,
    **NO_DROPOUT,
    "image_size": [IMAGE, IMAGE],
    "patch_size": [PATCH, PATCH],
}
LAYERS = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.o_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "ffn.up_proj",
    "output.dense": "ffn.down_proj",
    "layernorm_before": "attention_norm",
    "layernorm_after": "ffn_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.out_proj": "attention.o_proj",
    "mlp.fc1": "ffn.up_proj",
    "mlp.fc2": "ffn.down_proj",
    "layer_norm1": "attention_norm",
    "layer_norm2": "ffn_norm",
}
REST = {
    "embeddings.cls_token": "embedding.cls_token.weight",
    "embeddings.class_embedding": "embedding.cls_token.weight",
    "embeddings.position_embeddings": "embedding.position_embeddings.weight",
    "embeddings.position_embedding.weight": "embedding.position_embeddings.weight",
    "embeddings.patch_embeddings.projection.weight": "embedding.patches.projection.weight",
    "embeddings.patch_embeddings.projection.bias": "embedding.patches.projection.bias",
    "embeddings.patch_embedding.weight": "embedding.patches.projection.weight",
    "layernorm.weight": "final_norm.weight",
    "layernorm.bias": "final_norm.bias",
    "post_layernorm.weight": "final_norm.weight",
    "post_layernorm.bias": "final_norm.bias",
    "pre_layrnorm.weight": "embedding.norm.weight",
    "pre_layrnorm.bias": "embedding.norm.bias",
}


def translated(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors under the names of our encoder, or of the head."""
    for name, value in tensors.items():
        inner = name.removeprefix("vit.").removeprefix("vision_model.")
        if inner.startswith("classifier."):
            yield inner.replace("classifier", "head"), value
            continue
        for prefix in ("encoder.layer.", "encoder.layers.", "layers."):
            if inner.startswith(prefix):
                number, _, rest = inner.removeprefix(prefix).partition(".")
                module, _, kind = rest.rpartition(".")
                yield f"encoder.layers.{number}.{LAYERS[module]}.{kind}", value
                break
        else:
            ours = REST[inner]
            if "cls_token" in ours:
                value = value.reshape(-1)
            if "position" in ours:  # their class token is first
                table = value.reshape(-1, value.shape[-1])
                value = torch.cat((table[1:], table[:1]))
            yield f"encoder.{ours}", value


def fill(theirs: nn.Module, ours: nn.Module) -> None:
    """Draw their weights, and copy them."""
    generator = torch.Generator().manual_seed(1)
    params = dict(ours.named_parameters())
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((drawn * 0.2 + is_scale).to(param.dtype))
        for name, value in translated(dict(theirs.named_parameters())):
            params.pop(name).copy_(value)
    assert not params


def compare_gradients(theirs: nn.Module, ours: nn.Module, tolerance: float) -> None:
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    for name, expected in translated({key: one for key, one in grads.items() if one is not None}):
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "output", "gradient"),
    [(torch.float64, 1e-10, 1e-9), (torch.float32, 1e-5, 1e-4)],
)
def test_logits_and_gradients_are_those_of_vit(
    dtype: torch.dtype, output: float, gradient: float
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.ViTConfig(**THEIR_SIZES, layer_norm_eps=1e-6, num_labels=5)
    theirs = transformers.ViTForImageClassification(config).to(dtype).eval()
    ours = Vit(
        **OURS,
        layer_norm_epsilon=1e-6,
        use_conv_patchified_embedding=True,
        use_bias_in_output=True,
    )
    ours = ours.to(dtype).eval()
    fill(theirs, ours)
    images = torch.randn(3, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(2)).to(dtype)
    labels = torch.tensor([0, 4, 2])

    expected, found = theirs(pixel_values=images, labels=labels), ours((images, labels))

    torch.testing.assert_close(found["logits"], expected.logits, rtol=output, atol=output)
    torch.testing.assert_close(found["loss"], expected.loss.float())
    expected.logits.square().mean().backward()
    found["logits"].square().mean().backward()
    compare_gradients(theirs, ours, gradient)


def test_states_and_gradients_are_those_of_the_vision_part_of_clip() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.CLIPVisionConfig(**THEIR_SIZES)
    theirs = transformers.CLIPVisionModel(config).double().eval()
    ours = nn.Module()
    ours.encoder = VisionEncoder(
        VisionSettings(
            **{key: one for key, one in OURS.items() if key != "num_classes"},
            nonlinearity="quick_gelu",
            use_post_embed_layer_norm=True,
            use_embed_proj_bias=False,
            use_conv_patchified_embedding=True,
        )
    )
    ours = ours.double().eval()
    fill(theirs, ours)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 3, IMAGE, IMAGE, generator=generator, dtype=torch.float64)

    expected, found = theirs(pixel_values=images), ours.encoder(images, after=(-1,))

    torch.testing.assert_close(found.earlier[0], expected.last_hidden_state)
    torch.testing.assert_close(found.cls, expected.pooler_output)
    expected.pooler_output.square().sum().backward()
    found.cls.square().sum().backward()
    compare_gradients(theirs, ours, 1e-9)
