"""Learning rate factors for groups of parameters that a model defines."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, OptimizerFactory, make_param_groups, scheduler_class
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.zoo.models.llama_settings import LLAMA

SMALL = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "filter_size": 24}
SMALL |= {"num_hidden_layers": 1, "max_position_embeddings": 6}
MUP = {"mup_base_hidden_size": 4, "mup_base_filter_size": 8}
ATTENTION = "layers.0.attention.q_proj.weight"
VALUES = "layers.0.attention.v_proj.weight"


@dataclass
class Group:
    param_filter_patterns: list[str]
    scale: float = 1.0


def gpt2(**settings):
    return Gpt2(**SMALL, **settings)


def frozen():
    model = gpt2().requires_grad_(False)
    model.final_norm.requires_grad_(True)
    return model


def factors_of(model, optimizer):
    """Return the learning rate factor of each parameter, by name."""
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: group.get("adjust_learning_rate", 1.0)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def rates_of(model, optimizer):
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: group["lr"] for group in optimizer.param_groups for param in group["params"]
    }


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_mup_adjusts_the_rate_of_every_optimizer(name):
    model = gpt2(**MUP)
    optimizer = OPTIMIZERS[name](model, lr=0.6)
    rates = rates_of(model, optimizer)
    assert len(rates) == len(list(model.parameters()))
    expected = dict.fromkeys(rates, 0.6)
    for key in rates:
        if "layers" in key and key.endswith("_proj.weight"):
            expected[key] = 0.6 / 3 if "down_proj" in key else 0.6 / 2
    assert rates == pytest.approx(expected)
    assert sum(rate != 0.6 for rate in rates.values()) == 6
    assert factors_of(model, optimizer) == pytest.approx(
        {key: rate / 0.6 for key, rate in expected.items()}
    )


def test_without_mup_there_are_no_factors():
    groups = make_param_groups(gpt2(), weight_decay=0.1, lr=0.5)
    assert len(groups) == 2
    assert not any("adjust_learning_rate" in group or "lr" in group for group in groups)


def test_a_schedule_is_multiplied_by_the_factor():
    model = gpt2(**MUP)
    optimizer = OPTIMIZERS["AdamW"](model, lr=0.6)
    schedule = scheduler_class("LinearLR")(optimizer, 1.0, 0.0, 4)
    schedule.step()
    rates = rates_of(model, optimizer)
    assert rates[ATTENTION] == 0.375
    assert rates["token_embeddings.weight"] == 0.75


def test_a_factor_by_hand_wins_over_that_of_mup_also_for_a_wider_group():
    model = gpt2(**MUP)
    factors = factors_of(
        model, OPTIMIZERS["AdamW"](model, adjust_learning_rate={"decoder_kernel": 0.25})
    )
    kernels = {key for key in factors if "layers" in key and key.endswith("_proj.weight")}
    assert len(kernels) == 6
    assert {factors[key] for key in kernels} == {0.25}
    assert {factors[key] for key in factors.keys() - kernels} == {1.0}


def test_a_factor_by_hand_may_be_one():
    model = gpt2(**MUP)
    factors = factors_of(
        model, OPTIMIZERS["AdamW"](model, adjust_learning_rate={"decoder_attention": 1})
    )
    assert factors[ATTENTION] == 1
    assert factors["layers.0.ffn.up_proj.weight"] == 0.5


@pytest.mark.parametrize("swap", [False, True])
def test_of_two_by_hand_that_of_the_narrower_group_wins(swap):
    given = [("decoder_kernel", 0.25), ("decoder_attention", 0.75)]
    model = Gpt2(**SMALL, **LLAMA, rotary_dim=4)
    optimizer = OptimizerFactory(
        OPTIMIZERS["SGD"], {"adjust_learning_rate": dict(given[::-1] if swap else given)}
    )(model)
    factors = factors_of(model, optimizer)
    assert factors[ATTENTION] == 0.75
    assert factors["layers.0.ffn.gate_proj.weight"] == 0.25


def test_of_groups_that_are_equally_wide_the_later_one_wins():
    model = nn.Linear(2, 2)
    model.lr_adjustment_groups = {"a": Group(["weight"], 0.5), "b": Group(["*t"], 0.25)}
    assert factors_of(model, OPTIMIZERS["SGD"](model)) == {"weight": 0.25, "bias": 1.0}
    by_hand = OPTIMIZERS["SGD"](model, adjust_learning_rate={"b": 0.1, "a": 0.2})
    assert factors_of(model, by_hand)["weight"] == 0.1


def test_a_tied_parameter_is_found_by_each_of_its_names():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model["second"].weight = model["first"].weight
    model.lr_adjustment_groups = {"second": Group(["second.*"])}
    optimizer = OPTIMIZERS["SGD"](model, adjust_learning_rate={"second": 0.5})
    assert factors_of(model, optimizer) == {
        "first.weight": 0.5,
        "first.bias": 1.0,
        "second.bias": 0.5,
    }


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (
            gpt2,
            {"decoder_kernl": 0.5},
            r"adjust_learning_rate\.decoder_kernl: Gpt2 has no such group\. Did you mean 'decoder",
        ),
        (gpt2, {"zzz": 0.5}, r"no such group\. Known: decoder_attention, decoder_input_ffn, dec"),
        (gpt2, {"embedding": -1.0}, r"adjust_learning_rate\.embedding is -1\.0; it must be a n"),
        (gpt2, {"embedding": float("nan")}, r"adjust_learning_rate\.embedding is nan"),
        (
            lambda: nn.Linear(2, 2),
            {"embedding": 0.5},
            r"for embedding, but Linear has no such groups\. .* lr_adjust",
        ),
        (
            frozen,
            {"embedding": 0.5},
            r"adjust_learning_rate\.embedding: no trainable parameter has a name like \*_embed",
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused(model, given, message):
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS["AdamW"](model(), adjust_learning_rate=given)


def test_factors_need_a_model():
    with pytest.raises(ConfigError, match="adjust_learning_rate: groups need a model, "):
        OPTIMIZERS["SGD"](nn.Linear(1, 1).parameters(), adjust_learning_rate={"a": 0.5})


def test_optimizers_of_torch_are_adjusted_as_well():
    model = gpt2(**MUP)
    rates = rates_of(model, OptimizerFactory(torch.optim.SGD, {"lr": 0.6})(model))
    assert rates[ATTENTION] == pytest.approx(0.3)
    assert rates["token_embeddings.weight"] == 0.6


def test_a_training_step_of_sgd_is_as_large_as_the_factor():
    model = gpt2()
    optimizer = OPTIMIZERS["SGD"](model, lr=0.5, adjust_learning_rate={"decoder_attention": 0.5})
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    model({"input_ids": torch.arange(6).view(1, 6), "labels": torch.arange(6).view(1, 6)})[
        "loss"
    ].backward()
    optimizer.step()
    params = dict(model.named_parameters())
    for key, rate in ((VALUES, 0.25), ("layers.0.ffn.up_proj.weight", 0.5)):
        expected = before[key].add(params[key].grad, alpha=-rate)
        assert torch.equal(params[key], expected)
        assert not torch.equal(expected, before[key])
