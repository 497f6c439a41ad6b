"""Predicted noise and gradients are those of diffusers, with the same weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.vision.dit import Dit
from modelzoo_trainer.zoo.models.vision.dit_parts import timestep_waves

pytestmark = pytest.mark.slow

HEADS, SIZE, CHANNELS, PATCH, CLASSES, CHANNELS_OF_TIME = 4, 32, 4, 2, 5, 256
# Several of ours are the rows of one of theirs, in this order.
LAYERS = {
    "attn1.to_q": ("attention.q_proj",),
    "attn1.to_k": ("attention.k_proj",),
    "attn1.to_v": ("attention.v_proj",),
    "attn1.to_out.0": ("attention.o_proj",),
    "ff.net.0.proj": ("ffn.up_proj",),
    "ff.net.2": ("ffn.down_proj",),
    "norm1.linear": (
        *("attention_norm.shift", "attention_norm.scale", "attention_gate"),
        *("ffn_norm.shift", "ffn_norm.scale", "ffn_gate"),
    ),
}
REST = {
    "pos_embed.proj": ("embedding.patches.projection",),
    "proj_out_1": ("head.norm.shift", "head.norm.scale"),
    "proj_out_2": ("head.projection",),
}
OF_TIME = {"linear_1": "in_proj", "linear_2": "out_proj"}
TIME, LABELS = ".norm1.emb.timestep_embedder.", ".norm1.emb.class_embedder.embedding_table."


class OurWaves(nn.Module):
    """The sines of a timestep; theirs have other frequencies."""

    def forward(self, timesteps: Tensor) -> Tensor:
        return timestep_waves(timesteps, CHANNELS_OF_TIME)


def make(dtype: torch.dtype, **changes: Any) -> tuple[Any, Dit]:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZE // HEADS,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        sample_size=8,
        patch_size=PATCH,
        activation_fn="gelu",
        num_embeds_ada_norm=CLASSES,
        norm_eps=1e-6,
    )
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj = OurWaves()
    ours = Dit(
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_heads=HEADS,
        filter_size=4 * SIZE,
        latent_size=[8, 8],
        latent_channels=CHANNELS,
        patch_size=[PATCH, PATCH],
        num_classes=CLASSES,
        position_embedding_type="fixed",
        use_conv_patchified_embedding=True,
        layer_norm_epsilon=1e-6,
        **changes,
    )
    return theirs.to(dtype).eval(), ours.to(dtype).eval()


def translated(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield one of their tensors, or its parts, under our names."""
    module, _, kind = name.rpartition(".")
    if TIME in name:
        names = [f"timestep_embedding.{OF_TIME[module.rpartition('.')[2]]}"]
    elif LABELS in name:
        names = ["label_embedding"]
    elif name.startswith("transformer_blocks."):
        _, number, part = module.split(".", 2)
        names = [f"layers.{number}.{ours}" for ours in LAYERS[part]]
    else:
        names = list(REST[module])
    for ours, rows in zip(names, value.chunk(len(names)), strict=True):
        yield f"{ours}.{kind}", rows


def is_of_condition(name: str) -> bool:
    return TIME in name or LABELS in name


def fill(theirs: nn.Module, ours: Dit, *, is_convolution: bool) -> None:
    """Draw their weights, and copy them; all their layers embed time and label in the same way."""
    generator = torch.Generator().manual_seed(1)
    params = dict(ours.named_parameters())
    first = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((drawn * 0.2).to(param.dtype))
            if is_convolution and name == "proj_out_2.bias":  # ours has one for each channel
                param.copy_(param[:CHANNELS].repeat(PATCH * PATCH))
            if is_of_condition(name):
                param.copy_(first[f"transformer_blocks.0.{name.split('.', 2)[2]}"])
        for name, value in theirs.named_parameters():
            for key, part in translated(name, value):
                if key in params:
                    params.pop(key).copy_(of_head(key, part, is_convolution=is_convolution))
    assert not params


def of_head(name: str, value: Tensor, *, is_convolution: bool, is_grad: bool = False) -> Tensor:
    """Return the weight or the bias of the last projection as a convolution has it."""
    if not is_convolution or not name.startswith("head.projection."):
        return value
    cut = value.unflatten(0, (PATCH, PATCH, CHANNELS))
    if cut.dim() == 3:
        return cut.sum((0, 1)) if is_grad else cut[0, 0]
    return cut.permute(3, 2, 0, 1)


@pytest.mark.parametrize("is_convolution", [True, False])
@pytest.mark.parametrize(
    ("dtype", "output", "gradient"),
    [(torch.float64, 1e-6, 1e-6), (torch.float32, 1e-5, 1e-4)],
)
def test_noise_and_gradients_are_those_of_diffusers(
    dtype: torch.dtype, output: float, gradient: float, is_convolution: bool
) -> None:
    theirs, ours = make(dtype, use_conv_transpose_unpatchify=is_convolution)
    fill(theirs, ours, is_convolution=is_convolution)
    noisy = torch.randn(3, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    labels, timesteps = torch.tensor([0, 4, CLASSES]), torch.tensor([0, 500, 999])

    expected = theirs(noisy, timestep=timesteps, class_labels=labels).sample
    found = ours.predict_noise(noisy, labels, timesteps)

    torch.testing.assert_close(found, expected, rtol=output, atol=output)
    expected.square().mean().backward()
    found.square().mean().backward()
    grads: dict[str, Tensor] = {}
    for name, param in theirs.named_parameters():
        for key, part in translated(name, param.grad):
            grads[key] = grads.get(key, torch.zeros_like(part)) + part
    assert grads.keys() == dict(ours.named_parameters()).keys()
    for key, grad in grads.items():
        grad = of_head(key, grad, is_convolution=is_convolution, is_grad=True)
        torch.testing.assert_close(
            ours.get_parameter(key).grad, grad, rtol=gradient, atol=gradient, msg=key
        )
