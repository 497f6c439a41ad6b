"""Logits and gradients are those of transformers, with the same weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.models.llava_cases import HOLDER, IMAGE, PATCHES, TEXT, VOCAB, WIDTH, batch_of, make
from tests.zoo.models.parity import llama_tensors
from tests.zoo.models.test_parity_vit import translated as vision_tensors

pytestmark = pytest.mark.slow

VISION: dict[str, Any] = {
    "hidden_size": IMAGE["hidden_size"],
    "num_hidden_layers": IMAGE["num_hidden_layers"],
    "num_attention_heads": IMAGE["num_heads"],
    "intermediate_size": IMAGE["filter_size"],
    "image_size": 8,
    "patch_size": 4,
}
LANGUAGE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": TEXT["num_heads"],
    "num_hidden_layers": TEXT["num_hidden_layers"],
    "intermediate_size": TEXT["filter_size"],
    "max_position_embeddings": TEXT["max_position_embeddings"],
    "rms_norm_eps": 1e-5,
}


def translated(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors under our names."""
    tower, text = "model.vision_tower.", {}
    vision = {
        name.removeprefix(tower): one for name, one in tensors.items() if name.startswith(tower)
    }
    for name, value in vision_tensors(vision):
        yield name.replace("encoder.", "image_model.", 1), value
    for number in (1, 2):
        for kind in ("weight", "bias"):
            theirs = f"model.multi_modal_projector.linear_{number}.{kind}"
            yield f"projector.layers.{number - 1}.{kind}", tensors[theirs]
    for name, value in tensors.items():
        text[name.replace("model.language_model.", "model.")] = value
    for name, value in llama_tensors(text):
        yield f"text_model.{name}", value


@pytest.mark.parametrize(
    ("dtype", "output", "gradient"),
    [(torch.float64, 1e-6, 1e-6), (torch.float32, 1e-5, 1e-4)],  # angles are float32
)
def test_logits_and_gradients_are_those_of_llava(
    dtype: torch.dtype, output: float, gradient: float
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**LANGUAGE),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_token_index=HOLDER,
        image_seq_length=PATCHES,
        projector_hidden_act="gelu",
    )
    theirs = transformers.LlavaForConditionalGeneration(config).to(dtype).eval()
    ours = make().to(dtype).eval()
    generator = torch.Generator().manual_seed(4)
    params = dict(ours.named_parameters())
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_((drawn * 0.1 + is_scale).to(param.dtype))
        for name, value in translated(dict(theirs.named_parameters())):
            params.pop(name).copy_(value)
    assert not params
    batch = batch_of()
    batch["image_data"] = batch["image_data"].to(dtype)
    real = batch["key_padding_mask"] == 0

    expected = theirs(
        input_ids=batch["text_input_ids"].long(),
        pixel_values=batch["image_data"],
        attention_mask=real.long(),
    ).logits
    found = ours(batch)["logits"]

    torch.testing.assert_close(found[real], expected[real], rtol=output, atol=output)
    expected[real].square().mean().backward()
    found[real].square().mean().backward()
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in theirs.named_parameters()
    }
    for name, one in translated(grads):
        param = ours.get_parameter(name)
        if not param.requires_grad:  # later layers of the image model
            assert not one.any()
            continue
        torch.testing.assert_close(param.grad, one, rtol=gradient, atol=gradient)
