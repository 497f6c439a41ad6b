"""Muon: which parameters it updates, and that its steps equal torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, OptimizerFactory, scheduler_class

Muon = OPTIMIZERS["Muon"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(2, 3, 1)
        self.back = nn.Linear(6, 4)
        self.lm_head = nn.Linear(4, 7)


def owned(model, optimizer):
    """Return the names of the parameters of Muon, and of AdamW."""
    names = {param: name for name, param in model.named_parameters()}
    return tuple(
        [
            names[param]
            for group in optimizer.param_groups
            if group["use_muon"] is wanted
            for param in group["params"]
        ]
        for wanted in (True, False)
    )


def give_gradients(params, seed):
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn_like(param)


def test_hidden_matrices_are_muons_and_all_else_is_adamws():
    model = Net()
    muon, adamw = owned(model, Muon(model))
    assert muon == ["hidden.weight", "back.weight"]
    assert sorted(adamw) == [
        "back.bias",
        "conv.bias",
        "conv.weight",
        "hidden.bias",
        "lm_head.bias",
        "lm_head.weight",
        "norm.bias",
        "norm.weight",
        "tokens.weight",
    ]


def test_stacked_biases_are_adamws():
    model = nn.Module()
    model.up, model.up_bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3, 4))
    model.position_bias = nn.Linear(1, 4, bias=False)
    muon, adamw = owned(model, Muon(model))
    assert muon == ["up"]
    assert sorted(adamw) == ["position_bias.weight", "up_bias"]


def test_a_subclass_has_a_default_rate_of_its_own():
    class Faster(Muon):
        default_lr = 3e-2

    optimizer = Faster(Net())
    assert {group["lr"] for group in optimizer.param_groups} == {3e-2}


def test_the_user_says_which_matrices_adamw_takes():
    model = Net()
    muon, _ = owned(model, Muon(model, adamw_params=["back.*"]))
    assert muon == ["hidden.weight", "lm_head.weight"]
    muon, _ = owned(model, Muon(model, adamw_params=[]))
    assert muon == ["hidden.weight", "back.weight", "lm_head.weight"]
    with pytest.raises(ConfigError, match=r"Muon\.adamw_params: 'bak\.\*' matches no trainable"):
        Muon(model, adamw_params=["bak.*"])


def test_a_head_that_is_tied_to_an_embedding_is_adamws():
    model = Net()
    model.lm_head.weight = model.tokens.weight
    muon, adamw = owned(model, Muon(model, adamw_params=[]))
    assert muon == ["hidden.weight", "back.weight"]
    assert "tokens.weight" in adamw


def test_parameters_without_a_model_are_split_by_their_dimensions_and_their_group():
    first, second, vector = (nn.Parameter(torch.ones(size)) for size in ((2, 2), (3, 3), (4,)))
    optimizer = Muon([{"params": [first, vector]}, {"params": [second], "use_muon": False}])
    found = [(group["use_muon"], group["params"]) for group in optimizer.param_groups]
    assert [(flag, [tuple(one.shape) for one in members]) for flag, members in found] == [
        (True, [(2, 2)]),
        (False, [(4,)]),
        (False, [(3, 3)]),
    ]
    assert [group["use_muon"] for group in Muon([first]).param_groups] == [True]
    with pytest.raises(ConfigError, match=r"Muon\.adamw_params: patterns need a model"):
        Muon([first], adamw_params=["*"])


def test_its_steps_are_those_of_torchs_two():
    ours, theirs = Net(), Net()
    optimizer = Muon(ours, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    matrices = [theirs.hidden.weight, theirs.back.weight]
    decaying = [theirs.tokens.weight, theirs.lm_head.weight, theirs.conv.weight]
    chosen = {id(one) for one in matrices + decaying}
    others = [param for param in theirs.parameters() if id(param) not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    for seed in range(4):
        give_gradients(ours.parameters(), seed)
        give_gradients(theirs.parameters(), seed)
        optimizer.step()
        muon.step()
        adamw.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, their)


def test_a_schedule_sets_the_rate_of_both():
    model = Net()
    optimizer = Muon(model, lr=1.0)
    scheduler_class("ConstantLR")(optimizer, 0.0)
    before = [param.detach().clone() for param in model.parameters()]
    give_gradients(model.parameters(), 0)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_loaded_groups_are_those_that_are_stepped():
    model = Net()
    optimizer = Muon(model, lr=1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [param.detach().clone() for param in model.parameters()]
    give_gradients(model.parameters(), 0)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(optimizer.state[param] for param in model.parameters())


def test_tags_and_weight_decay_are_split_as_well():
    filters = [{"params": "hidden.*", "tag": "hidden"}]
    optimizer = OptimizerFactory(Muon, {"params": filters, "weight_decay": 0.3})(Net())
    found = {
        (group["use_muon"], tuple(group.get("tags", ())), group["weight_decay"])
        for group in optimizer.param_groups
    }
    assert found == {
        (True, ("hidden",), 0.3),
        (False, ("hidden",), 0.0),
        (True, (), 0.3),
        (False, (), 0.3),
        (False, (), 0.0),
    }


def test_a_copy_steps_as_the_original():
    model = torch.nn.Linear(3, 2)
    copied, optimizer = copy.deepcopy((model, Muon(model, lr=0.1)))
    copied(torch.ones(1, 3)).sum().backward()
    before = copied.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(copied.weight, before)
