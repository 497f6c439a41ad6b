"""Weights with the names of the Cerebras Model Zoo, of decoders besides llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.conversion.cerebras import plan_from_cerebras, plan_to_cerebras, state_of
from modelzoo_trainer.zoo.conversion.engine import InMemory, shapes_of
from modelzoo_trainer.zoo.models.gpt2 import Gpt2

SLOPES = "model.embedding_layer.position_embed_helper.slopes"
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "max_position_embeddings": 16,
}
ALIBI = SIZES | {"position_embedding_type": "alibi", "embedding_layer_norm": True}


def there(model: Gpt2, arguments: dict[str, Any]) -> dict[str, Tensor]:
    shapes = shapes_of(Gpt2, arguments)
    source = InMemory(dict(model.state_dict()))
    return dict(plan_to_cerebras(source, model, shapes, where="the model").tensors())


def here(tensors: dict[str, Tensor], model: Gpt2, arguments: dict[str, Any]) -> dict[str, Tensor]:
    shapes = shapes_of(Gpt2, arguments)
    plan = plan_from_cerebras(InMemory(tensors), model, shapes, where="the file")
    return dict(plan.tensors())


def check(found: dict[str, Tensor], model: Gpt2) -> None:
    state = model.state_dict()
    del state["lm_head.weight"]  # shares the weights of the embedding
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("trained", [False, True])
def test_the_slopes_of_alibi_have_their_name(trained: bool) -> None:
    arguments = ALIBI | {"alibi_trainable_slopes": trained}
    model = Gpt2(**arguments)
    tensors = there(model, arguments)
    assert tensors[SLOPES].shape == (3, 1)
    check(here(tensors, model, arguments), model)


def test_slopes_that_a_file_lacks_are_made_unless_they_are_trained() -> None:
    model = Gpt2(**ALIBI)
    tensors = there(model, ALIBI)
    slopes = tensors.pop(SLOPES)
    check(here(tensors, model, ALIBI), model)
    arguments = ALIBI | {"alibi_trainable_slopes": True}
    trained = Gpt2(**arguments)
    with pytest.raises(CheckpointError, match=r"no tensor .*slopes"):
        here(tensors, trained, arguments)
    check(here(tensors | {"model.relative_pe_helper.slopes": slopes}, model, ALIBI), model)


def test_positions_of_older_versions_are_read() -> None:
    model = Gpt2(**SIZES)
    tensors = there(model, SIZES)
    name = "model.embedding_layer.position_embeddings.embed.weight"
    tensors[name.replace(".embed.", ".")] = tensors.pop(name)
    check(here(tensors, model, SIZES), model)


LAYER = "model.transformer_decoder.layers.1.ffn"
MIXTURE: dict[str, Any] = SIZES | {"filter_size": 8, "nonlinearity": "swiglu"}
EXPERTS: dict[str, list[str]] = {
    "experimental": [
        *("gate.weight", "experts.experts.2.0.linear_layer.bias"),
        *(
            "experts.experts.0.0.linear_layer_for_glu.weight",
            "experts.experts.3.1.linear_layer.weight",
        ),
        *("experts.shared_experts.0.ffn.0.linear_layer.weight",),
        *("experts.shared_experts.1.ffn.1.linear_layer.bias",),
    ],
    "functional": [
        *("gate.weight", "experts.experts.2.ffn.0.linear_layer.bias"),
        *("experts.experts.0.ffn.0.linear_layer_for_glu.weight",),
        *("experts.experts.5.ffn.1.linear_layer.weight",),
    ],
    "optimized": [
        *("gate.weight", "experts.fused_ffns.0.linear_layer.expert_weights"),
        *("experts.fused_ffns.0.linear_layer_for_glu.expert_biases",),
        *("experts.fused_ffns.1.linear_layer.expert_biases",),
    ],
}
NUM_TENSORS = {"experimental": 37, "functional": 37, "optimized": 7}


def of_experts(implementation: str, **moe: Any) -> dict[str, Any]:
    experts = {"num_experts": 4, "top_k": 2, "moe_implementation": implementation}
    return MIXTURE | {"moe": experts | moe}


@pytest.mark.parametrize("implementation", EXPERTS)
def test_experts_have_the_names_of_each_implementation(implementation: str) -> None:
    arguments = of_experts(implementation, num_shared_experts=2)
    model = Gpt2(**arguments)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)
    tensors = there(model, arguments)
    found = {name.removeprefix(f"{LAYER}.") for name in tensors if name.startswith(LAYER)}
    assert len(found) == NUM_TENSORS[implementation]
    assert found.issuperset(EXPERTS[implementation])
    other = of_experts("functional", num_shared_experts=2)  # the names in the file decide
    check(here(tensors, Gpt2(**other), other), model)


def test_each_expert_has_its_own_weights_there() -> None:
    arguments = of_experts("experimental", num_shared_experts=1)
    model = Gpt2(**arguments)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)
    tensors = there(model, arguments)
    own = dict(model.named_parameters())
    for number, place in ((1, "experts.1"), (4, "shared_experts.0.ffn")):
        for ours, theirs in (
            ("up", "0.linear_layer.weight"),
            ("gate_bias", "0.linear_layer_for_glu.bias"),
            ("down", "1.linear_layer.weight"),
            ("down_bias", "1.linear_layer.bias"),
        ):
            expected = own[f"layers.1.ffn.experts.{ours}"][number]
            assert torch.equal(tensors[f"{LAYER}.experts.{place}.{theirs}"], expected)
    arguments = of_experts("optimized", num_shared_experts=1)
    fused = there(Gpt2(**arguments), arguments)
    assert fused[f"{LAYER}.experts.fused_ffns.0.linear_layer.expert_weights"].shape == (8, 5, 12)
    assert fused[f"{LAYER}.experts.fused_ffns.0.linear_layer.expert_biases"].shape == (8, 5, 1)


@pytest.mark.parametrize("implementation", EXPERTS)
def test_experts_without_gate_and_biases_go_there_and_back(implementation: str) -> None:
    arguments = of_experts(implementation) | {"nonlinearity": "relu", "use_ffn_bias": False}
    model = Gpt2(**arguments)
    check(here(there(model, arguments), model, arguments), model)


def test_a_router_that_routes_by_hash_is_not_needed() -> None:
    arguments = of_experts("experimental", routing_algorithm="hash", top_k=1)
    model = Gpt2(**arguments)
    unused = {f"{LAYER}.gate.weight": torch.ones(4, 12)}
    check(here(there(model, arguments) | unused, model, arguments), model)


def test_the_final_norm_and_a_tied_output_layer_are_there_twice() -> None:
    model = Gpt2(**SIZES)
    plan = plan_to_cerebras(
        InMemory(dict(model.state_dict())), model, shapes_of(Gpt2, SIZES), where="the model"
    )
    tensors = state_of(plan, model)["model"]
    for name, again in (
        ("transformer_decoder.norm.weight", "ln_f.weight"),
        ("transformer_decoder.norm.bias", "ln_f.bias"),
        ("embedding_layer.word_embeddings.weight", "lm_head.weight"),
    ):
        assert torch.equal(tensors[f"model.{name}"], tensors[f"model.{again}"])
    check(here(tensors, model, SIZES), model)
