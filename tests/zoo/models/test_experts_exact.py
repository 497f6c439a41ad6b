"""Experts by sorted tokens against all experts for all tokens, as the sum was once computed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backends import grouped_products
from modelzoo_trainer.zoo.models.experts import Experts, MixtureOfExperts
from modelzoo_trainer.zoo.models.moe_settings import read_moe

B, T, H, F = 2, 24, 16, 32
CHOICES: dict[str, list[dict[str, Any]]] = {
    "top_k": [{"top_k": 1, "null_expert_bias": 0.4}, {"top_k": 2}, {"top_k": 5}],
    "shared": [{}, {"num_shared_experts": 2}],
    "before": [{}, {"probability_before_ffn": True}],
    "routing": [
        {},
        {"router_selection_nonlinearity": "sinkhorn"},
        {"expert_weighting_nonlinearity": "sigmoid", "expert_weighting_normalization": False},
        {"routing_algorithm": "uniform"},
    ],
}


def cases() -> dict[str, dict[str, Any]]:
    """Return all choices crossed, without those that contradict each other."""
    found = {}
    for number, parts in enumerate(itertools.product(*CHOICES.values())):
        moe: dict[str, Any] = {"num_experts": 5}
        for part in parts:
            moe |= part
        is_fixed = moe.get("routing_algorithm") == "uniform"
        if is_fixed and "num_shared_experts" in moe:
            continue
        if "expert_weighting_normalization" in moe:
            moe.pop("null_expert_bias", None)
        found[f"{number}: {', '.join(f'{key} {one}' for key, one in moe.items())}"] = moe
    return found


CASES = cases()


def make(moe: dict[str, Any], nonlinearity: Any = "swiglu", use_bias: bool = True) -> Any:
    torch.manual_seed(0)
    model = MixtureOfExperts(read_moe(moe), H, F, nonlinearity, use_bias, 0.0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def dense(model: Experts, hidden: Tensor, outer: Tensor, inner: Tensor | None) -> Tensor:
    """Return the sum over all experts; outer: of outputs, inner: of inputs, both (B, T, A)."""
    inputs = hidden.unsqueeze(-2)
    if inner is not None:
        inputs = inputs * inner.unsqueeze(-1)
    inputs = inputs.expand(-1, -1, model.up.shape[0], -1)

    def product(states: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
        found = torch.einsum("btai,aoi->btao", states, matrices)
        return found if biases is None else found + biases

    wide = product(inputs, model.up, model.up_bias)
    if model.gate is None:
        wide = model.activation(wide)
    else:
        wide = wide * model.activation(product(inputs, model.gate, model.gate_bias))
    outputs = product(wide, model.down, model.down_bias)
    return (outputs * outer.unsqueeze(-1)).sum(dim=-2)


def expected_of(model: MixtureOfExperts, hidden: Tensor, ids: Tensor) -> Tensor:
    routing = model.router(hidden, ids, None)
    zeros = torch.zeros(B, T, model.settings.num_experts)
    weights = zeros.scatter(-1, routing.ids, routing.weights)
    chosen = zeros.scatter(-1, routing.ids, 1.0)
    num = model.settings.num_shared
    weights, chosen = (functional.pad(one, (0, num), value=1.0) for one in (weights, chosen))
    if model.settings.probability_before_ffn:
        return dense(model.experts, hidden, chosen, weights)
    return dense(model.experts, hidden, weights, None)


def check(model: MixtureOfExperts, hidden: Tensor, ids: Tensor) -> None:
    """Compare outputs to 1e-5 and gradients to 1e-4."""

    def both(output: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        torch.manual_seed(1)
        loss = (output * torch.randn_like(output)).sum()
        return output, torch.autograd.grad(
            loss, (hidden, *model.parameters()), allow_unused=True, materialize_grads=True
        )

    output, gradients = both(model(hidden, ids, None)[0])
    expected, exact = both(expected_of(model, hidden, ids))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-4)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(B, T, H, requires_grad=True), torch.randint(50, (B, T))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_cases(every=4)
def test_outputs_and_gradients_are_those_of_the_dense_form(name: str) -> None:
    check(make(CASES[name]), *inputs())


@pytest.mark.parametrize("nonlinearity", ["swiglu", "gelu"])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("way", ["loop", "blocks"])
def test_every_implementation_and_network(
    way: str, nonlinearity: str, use_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_products, "_is_on_host", lambda _: way == "loop")
    moe = {"num_experts": 5, "top_k": 2, "num_shared_experts": 1}

    check(make(moe, nonlinearity, use_bias), *inputs())


def test_experts_without_tokens() -> None:
    model = make({"num_experts": 5, "routing_algorithm": "hash"})
    hidden, _ = inputs()

    check(model, hidden, torch.full((B, T), 3))
    check(model, hidden, torch.arange(B * T).view(B, T) % 2)


def test_ids_are_found_from_weights_of_all_experts() -> None:
    model = make({"num_experts": 5, "top_k": 2}).experts
    hidden, _ = inputs()
    weights = torch.zeros(B, T, 5).scatter(
        -1, torch.rand(B, T, 5).topk(2).indices, torch.rand(B, T, 2)
    )
    weights.requires_grad_()

    found = model(hidden, weights)
    found.square().sum().backward()
    gradient, weights.grad = weights.grad, None
    expected = dense(model, hidden, weights, None)
    expected.square().sum().backward()

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    used = weights != 0
    torch.testing.assert_close(gradient[used], weights.grad[used], rtol=1e-4, atol=1e-4)


def test_two_runs_have_the_same_bits() -> None:
    model = make({"num_experts": 5, "top_k": 3, "num_shared_experts": 1})
    hidden, ids = inputs()

    def run() -> list[Tensor]:
        output, _ = model(hidden, ids, None)
        return [output, *torch.autograd.grad(output.square().sum(), [*model.parameters()])]

    assert all(map(torch.equal, run(), run()))
