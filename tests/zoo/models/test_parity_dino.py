"""States and gradients of a trunk are those of transformers, with the same weights and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.vision.multi_image import MultiImageSettings, MultiImageViT

pytestmark = pytest.mark.slow

IMAGE, PATCH, LOCAL = 12, 2, 6
LAYER = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.o_proj",
    "attention.output.dense": "attention.o_proj",
    "mlp.fc1": "ffn.up_proj",
    "mlp.fc2": "ffn.down_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "layer_scale1": "attention_scale",
    "layer_scale2": "ffn_scale",
}
REST = {
    "embeddings.cls_token": "embedding.cls_token.weight",
    "embeddings.mask_token": "embedding.mask_token.weight",
    "embeddings.position_embeddings": "embedding.position_embeddings.weight",
    "embeddings.patch_embeddings.projection.weight": "embedding.patches.projection.weight",
    "embeddings.patch_embeddings.projection.bias": "embedding.patches.projection.bias",
    "layernorm.weight": "final_norm.weight",
    "layernorm.bias": "final_norm.bias",
}


def translated(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors under the names of our encoder."""
    for name, value in tensors.items():
        for prefix in ("encoder.layer.", "encoder.layers.", "layers."):
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                module, _, kind = rest.rpartition(".")
                kind = "weight" if kind == "lambda1" else kind
                yield f"encoder.layers.{number}.{LAYER[module]}.{kind}", value
                break
        else:
            ours = REST[name]
            if "_token" in ours:
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
        for param in theirs.parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((drawn * 0.2).to(param.dtype))
        for name, value in translated(dict(theirs.named_parameters())):
            params.pop(name).copy_(value)
    assert not params


@pytest.mark.parametrize("nonlinearity", ["gelu", "swiglu"])
@pytest.mark.parametrize("side", [IMAGE, LOCAL])
@pytest.mark.parametrize(
    ("dtype", "output", "gradient"),
    [(torch.float64, 1e-10, 1e-9), (torch.float32, 1e-5, 1e-4)],
)
def test_states_and_gradients_are_those_of_dinov2(
    nonlinearity: str, side: int, dtype: torch.dtype, output: float, gradient: float
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if side == LOCAL:  # they interpolate in float32
        output, gradient = max(output, 1e-6), max(gradient, 1e-5)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "image_size": IMAGE}
    config = transformers.Dinov2Config(
        **sizes,
        num_attention_heads=4,
        mlp_ratio=6 if nonlinearity == "swiglu" else 4,
        patch_size=PATCH,
        layer_norm_eps=1e-6,
        layerscale_value=0.3,
        use_mask_token=True,
        attn_implementation="sdpa",
        use_swiglu_ffn=nonlinearity == "swiglu",
    )
    theirs = transformers.Dinov2Model(config).to(dtype).eval()
    local = [LOCAL // PATCH] * 2
    settings = MultiImageSettings(
        **{**sizes, "image_size": [IMAGE, IMAGE]},
        num_heads=4,
        filter_size=128,
        nonlinearity=nonlinearity,
        patch_size=[PATCH, PATCH],
        layer_norm_epsilon=1e-6,
        layerscale_value=0.3,
        use_masked_patches=True,
        use_conv_patchified_embedding=True,
        interpolate_position_embedding={"local_patch_dims": local, "interpolate_offset": 0.0},
    )
    ours = MultiImageViT(settings).to(dtype).eval()
    fill(theirs, ours)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 2, 3, side, side, generator=generator).to(dtype)
    masked = torch.rand(3, 2, (side // PATCH) ** 2, generator=generator) < 0.4

    expected = theirs(pixel_values=images.flatten(0, 1), bool_masked_pos=masked.flatten(0, 1))
    states, cls = ours(images, None, masked)

    last = expected.last_hidden_state
    torch.testing.assert_close(states.flatten(0, 1), last, rtol=output, atol=output)
    torch.testing.assert_close(cls.flatten(0, 1), expected.pooler_output, rtol=output, atol=output)
    last.square().mean().backward()
    states.square().mean().backward()
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    for name, value in translated({key: one for key, one in grads.items() if one is not None}):
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, value, rtol=gradient, atol=gradient)
