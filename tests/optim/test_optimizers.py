"""The optimizers, their parameter groups and their factory."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from modelzoo_trainer import optim
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import (
    OPTIMIZERS,
    SCHEDULERS,
    OptimizerFactory,
    make_param_groups,
    optimizer_class,
    scheduler_class,
)


class MyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.rms = MyRMSNorm()
        self.hidden = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def named(model, group):
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for param in group["params"]]


def train(model, optimizer, num_steps=5):
    torch.manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        hidden = model.hidden(model.norm(model.embedding(torch.arange(5))) * model.rms.gain)
        nn.functional.cross_entropy(model.head(hidden), torch.randint(5, (5,))).backward()
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_adamw_takes_the_steps_of_torch_bit_by_bit():
    arguments = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1}
    ours, theirs, undecayed = Net(), Net(), Net()
    groups = make_param_groups(theirs, weight_decay=0.1)
    mine = train(ours, OPTIMIZERS["AdamW"](ours, **arguments, eps_after_correction=True))
    assert equal(mine, train(theirs, torch.optim.AdamW(groups, **arguments)))
    assert not equal(mine, train(undecayed, torch.optim.AdamW(undecayed.parameters(), **arguments)))


SAME_AS_TORCH = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
AFTER = "eps_after_correction"
NOT_TORCHS = {
    "model",
    "lr",
    "learning_rate",
    "params",
    "adjust_learning_rate",
    "correct_bias",
    AFTER,
}


@pytest.mark.parametrize("name", SAME_AS_TORCH)
def test_each_optimizer_takes_the_steps_of_torch_with_its_own_defaults(name):
    cls = OPTIMIZERS[name]
    signature = inspect.signature(cls).parameters
    arguments = {key: one.default for key, one in signature.items() if key not in NOT_TORCHS}
    ours, theirs = Net(), Net()
    optimizer = cls(ours, **({AFTER: True} if AFTER in signature else {}))
    their_cls = getattr(torch.optim, name)
    reference = their_cls(theirs.parameters(), lr=optimizer.defaults["lr"], **arguments)
    start = {key: param.detach().clone() for key, param in theirs.named_parameters()}
    trained = train(ours, optimizer)
    assert equal(trained, train(theirs, reference))
    assert not equal(trained, start)


@pytest.mark.parametrize("foreach", [False, True])
def test_the_momentum_of_sgd_begins_at_zero_with_dampening(foreach):
    param, late = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    group = {"params": [param, late], "foreach": foreach}
    optimizer = OPTIMIZERS["SGD"]([group], lr=1.0, momentum=0.9, dampening=0.5)
    found = []
    for step in range(3):
        param.grad, late.grad = torch.ones(1), torch.ones(1) if step else None
        optimizer.step()
        found.append((param.item(), late.item()))
    assert found[0] == (-0.5, 0.0)  # torch: -1
    assert found[1] == pytest.approx((-1.45, -0.5))
    assert found[2] == pytest.approx((-2.805, -1.45))


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}),
        ("Adam", {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "amsgrad": False}),
        ("Adagrad", {"lr": 0.01, "eps": 1e-6}),
        ("Adadelta", {"lr": 1.0, "rho": 0.9, "eps": 1e-6}),
        ("NAdam", {"lr": 2e-3, "eps": 1e-8, "momentum_decay": 4e-3}),
        ("Rprop", {"lr": 1e-3, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50)}),
        (
            "Lamb",
            {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "adam": False},
        ),
        ("Lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        (
            "AdaFactor",
            {"eps": (1e-30, 1e-3), "clip_threshold": 1, "decay_rate": -0.8, "beta1": None}
            | {"scale_parameter": True, "relative_step": False, "warmup_init": False},
        ),
        ("AdamBase", {"lr": 1e-3, "l2_regularization_rate": 0.0, "correct_bias": True}),
    ],
)
def test_the_defaults_are_those_of_the_model_zoo(name, defaults):
    optimizer = optimizer_class(name)(Net())
    assert {key: optimizer.param_groups[0][key] for key in defaults} == defaults


def test_names_of_optimizers_are_found_in_any_case():
    assert all(optimizer_class(name.lower()) is cls for name, cls in OPTIMIZERS.items())
    assert len(OPTIMIZERS) >= 16


def test_every_class_with_a_name_can_be_imported_from_the_package():
    named = OPTIMIZERS | SCHEDULERS
    assert sorted(named.keys() - {*optim.__all__}) == [], "add them to modelzoo_trainer.optim"
    assert all(getattr(optim, name) is cls for name, cls in named.items())


def test_a_misspelt_optimizer_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"'AdamV' is not an optimizer. Did you mean 'Adam"):
        optimizer_class("AdamV")


def test_lr_and_learning_rate_are_one_setting():
    for alias in ("lr", "learning_rate"):
        optimizer = optimizer_class("SGD")(Net(), **{alias: 0.3})
        assert {group["lr"] for group in optimizer.param_groups} == {0.3}
    with pytest.raises(ConfigError, match=r"SGD got lr=0.1 and learning_rate=0.2"):
        optimizer_class("SGD")(Net(), lr=0.1, learning_rate=0.2)


def test_parameters_are_taken_as_in_torch():
    model = Net()
    optimizer = optimizer_class("AdamW")(model.parameters(), weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    with pytest.raises(ConfigError, match="params: filters need a model"):
        optimizer_class("AdamW")(model.parameters(), params=[{"params": "*", "tag": "all"}])


def test_a_key_of_a_filter_without_effect_is_refused() -> None:
    filters: list[dict[str, object]] = [{"params": "*", "tag": "all", "lr": 3.0}]
    with pytest.raises(ConfigError, match=r"'lr'.*adjust_learning_rate"):
        make_param_groups(nn.Linear(2, 2), weight_decay=0.1, params=filters)


def test_biases_and_norm_layers_do_not_decay():
    model = Net()
    decaying, exempt = make_param_groups(model, weight_decay=0.1)
    assert named(model, decaying) == ["embedding.weight", "hidden.weight"]
    assert named(model, exempt) == ["norm.weight", "norm.bias", "rms.gain", "hidden.bias"]
    assert [decaying["weight_decay"], exempt["weight_decay"]] == [0.1, 0.0]


def test_a_position_bias_does_not_decay():
    model = nn.ModuleDict({"position_bias": nn.Embedding(4, 2), "other": nn.Embedding(4, 2)})
    _, exempt = make_param_groups(model, weight_decay=0.1)
    assert named(model, exempt) == ["position_bias.weight"]


def test_an_optimizer_without_weight_decay_has_one_group():
    model = Net()
    (group,) = make_param_groups(model, weight_decay=None)
    assert len(group["params"]) == 6
    assert group.keys() == {"params"}


def test_filters_tag_and_empty_groups_are_skipped():
    model = Net()
    filters = [
        {"params": ["norm.*", "rms.*"], "tag": "norms"},
        {"params": "head.*", "tag": "ends"},
    ]
    groups = make_param_groups(model, weight_decay=0.1, params=filters)
    assert [(group.get("tags"), named(model, group)) for group in groups] == [
        (["ends"], ["embedding.weight"]),  # tied to head.weight
        (["norms"], ["norm.weight", "norm.bias", "rms.gain"]),
        (None, ["hidden.weight"]),
        (None, ["hidden.bias"]),
    ]


def test_a_parameter_gets_the_tags_of_all_filters_that_match():
    model = Net()
    filters = [{"params": "hidden.*", "tag": "hidden"}, {"params": "*.weight", "tag": "matrices"}]
    groups = make_param_groups(model, weight_decay=0.1, params=filters)
    tags = {name: group.get("tags") for group in groups for name in named(model, group)}
    assert tags == {
        "embedding.weight": ["matrices"],
        "norm.weight": ["matrices"],
        "norm.bias": None,
        "rms.gain": None,
        "hidden.weight": ["hidden", "matrices"],
        "hidden.bias": ["hidden"],
    }


@pytest.mark.parametrize("pattern", ["hiden.*", "frozen"])
def test_a_filter_that_matches_nothing_is_refused(pattern):
    with pytest.raises(ConfigError, match=rf"params\[0\]: '{pattern[:3]}.* matches no trainable"):
        make_param_groups(Net(), weight_decay=0.1, params=[{"params": pattern, "tag": "t"}])


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="have requires_grad=False"):
        make_param_groups(Net().requires_grad_(False), weight_decay=0.1)


def test_a_factory_makes_the_optimizer_of_a_model():
    model = Net()
    filters = [{"params": "hidden.*", "tag": "hidden"}]
    make = OptimizerFactory(
        OPTIMIZERS["AdamW"], {"learning_rate": 0.3, "weight_decay": 0.1, "params": filters}
    )
    optimizer = make(model)
    assert type(optimizer) is OPTIMIZERS["AdamW"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.3}
    assert [group.get("tags") for group in optimizer.param_groups].count(["hidden"]) == 2
    scheduler_class("ConstantLR")(optimizer, 0.7, None, "hidden")
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.3, 0.3, 0.7, 0.7]


def test_a_factory_makes_optimizers_of_torch_with_the_same_groups():
    optimizer = OptimizerFactory(torch.optim.AdamW, {"learning_rate": 0.3})(Net())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_a_factory_refuses_what_the_optimizer_does_not_take():
    with pytest.raises(ConfigError, match="SGD takes no argument 'betas'"):
        OptimizerFactory(OPTIMIZERS["SGD"], {"betas": (0.9, 0.99)})
    with pytest.raises(ConfigError, match=r"is not a subclass of torch.optim.Optimizer"):
        OptimizerFactory(nn.Linear, {})
