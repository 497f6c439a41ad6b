"""Losses of models of `transformers` without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.hugging_face.attention import FAMILIES
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.head import parts_of
from modelzoo_trainer.zoo.models.language_loss import token_losses
from tests.zoo.hugging_face.hf_cases import SIZES, config_of, documents, language_batch, packed

pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]

# What happens to the logits there.
FACTORS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.5},
}


def make(model_type: str = "llama", **options: Any) -> HfCausalLm:
    torch.manual_seed(0)
    config = config_of(model_type) | FACTORS.get(model_type, {})
    model = HfCausalLm(config=config, **options).eval()
    with torch.no_grad():
        for param in model.parameters():  # else all logits are small
            if param.dim() > 1:
                param.mul_(4)
    return model


def learned(model: HfCausalLm, batch: dict[str, Tensor]) -> list[Tensor]:
    outputs = model(batch)
    params = [param for param in model.parameters() if param.requires_grad]
    gradients = torch.autograd.grad(outputs["loss"], params, allow_unused=True)
    assert ("logits" in outputs) == model.wants_logits
    return [outputs["loss"], outputs["accuracy"], *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_in_two_parts_each_family_is_the_same_as_a_whole(model_type: str) -> None:
    model = make(model_type)
    assert parts_of(model.model) is not None
    row = packed(documents())
    weights = torch.ones_like(row["input_ids"])
    weights[:, ::3] = 0
    labels = row["input_ids"].roll(-1, 1)
    batch = row | {"labels": labels, "attention_mask": weights}
    expected = learned(model, batch)
    each = token_losses(model.logits(row["input_ids"]), labels)

    model.requested_outputs = ()
    found = learned(model, batch)

    for one, other in zip(found, expected, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale)
    assert found[1] == expected[1]
    torch.testing.assert_close(model.label_losses(row["input_ids"], labels), each)


def hooked(model: HfCausalLm) -> None:
    model.model.lm_head.register_forward_hook(lambda *given: None)


def adapted(model: HfCausalLm) -> None:
    model.model.lm_head = type("Own", (nn.Linear,), {})(SIZES["hidden_size"], model.vocab_size)


def watched(model: HfCausalLm) -> None:
    model.model.register_forward_hook(lambda *given: None)


def patched(model: HfCausalLm) -> None:
    model.model.forward = model.model.forward


@pytest.mark.parametrize("change", [hooked, adapted, watched, patched])
def test_a_head_that_is_more_than_a_layer_is_called_as_a_whole(change: Any) -> None:
    model, batch = make(), language_batch()
    change(model)
    expected = model(batch)["loss"]

    model.requested_outputs = ()

    assert parts_of(model.model) is None
    torch.testing.assert_close(model(batch)["loss"], expected)


def test_adapters_of_other_layers_are_used() -> None:
    pytest.importorskip("peft", reason="needs peft")
    adapters = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    model, batch = make(peft_config=adapters), language_batch()
    expected = learned(model, batch)
    model.requested_outputs = ()

    assert parts_of(model.model) is not None
    torch.testing.assert_close(learned(model, batch), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99},
        config_of("mixtral") | {"output_router_logits": True},
    ],
    ids=["bloom", "mixtral"],
)
def test_other_architectures_are_called_as_a_whole(config: dict[str, Any]) -> None:
    model = HfCausalLm(config=config)

    assert parts_of(model.model) is None
    outputs = model({key: value % 99 for key, value in language_batch().items()})
    assert outputs["loss"].requires_grad


def test_compiled_it_is_one_graph() -> None:
    torch.compiler.reset()
    model, batch = make(), language_batch()
    model.requested_outputs = ()
    expected = model(batch)["loss"]

    compiled = torch.compile(model, backend="eager", fullgraph=True)

    torch.testing.assert_close(compiled(batch)["loss"], expected)
    torch.compiler.reset()
