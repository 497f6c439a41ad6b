"""Freezing by layer groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer.core.parts.training_mode import set_training_mode
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.freezing import ModelFreezer

NAMES = ["stem", "blocks.0", "blocks.1", "norm", "head"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3))
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.drop = nn.Dropout()
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 1)


@pytest.fixture
def model():
    return Net()


def trainable(model):
    return [name for name, param in model.named_parameters() if param.requires_grad]


def frozen(freezer):
    return [group.name for group in freezer.get_layer_groups() if group.is_frozen]


def test_groups_are_children_and_elements_of_lists_with_parameters(model):
    freezer = ModelFreezer(model)
    assert [group.name for group in freezer.get_layer_groups()] == NAMES
    assert freezer.get_layers() == [
        model.stem[0],
        model.stem[2],
        *model.blocks,
        model.norm,
        model.head,
    ]


def test_parameters_of_the_model_itself_are_a_group_in_front(model):
    model.scale = nn.Parameter(torch.ones(1))
    groups = ModelFreezer(model).get_layer_groups()
    assert [group.name for group in groups] == ["", *NAMES]
    assert groups[0].parameters == [model.scale]


def test_all_but_the_last_group_and_batch_norms_are_frozen(model):
    freezer = ModelFreezer(model)
    freezer.freeze()
    assert trainable(model) == ["stem.2.weight", "stem.2.bias", "head.weight", "head.bias"]
    assert freezer.get_trainable_parameters() == [
        *model.stem[2].parameters(),
        *model.head.parameters(),
    ]
    assert all(module.training for module in model.modules())


def test_batch_norms_can_be_frozen_as_well(model):
    ModelFreezer(model, freeze_batch_norms=True).freeze()
    assert trainable(model) == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"from_index": 1}, NAMES[1:4]),
        ({"from_index": -1, "to_index": -1}, NAMES[4:]),
        ({"to_index": -1}, NAMES),
        ({"from_index": 2, "to_index": 2}, NAMES[2:3]),
        ({"from_index": -5, "to_index": 0}, NAMES[:1]),
        ({"from_index": 4, "to_index": 0}, NAMES),
        ({"from_index": 3, "to_index": 1}, NAMES[1:4]),
    ],
)
def test_both_ends_are_included(model, arguments, expected):
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(**arguments)
    assert frozen(freezer) == expected


def test_freezing_can_put_modules_into_evaluation_mode(model):
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    assert frozen(freezer) == ["blocks.0", "blocks.1", "norm"]
    assert not model.stem[0].training
    assert not any(module.training for module in [*model.blocks, model.norm])
    assert model.stem[2].training
    assert model.head.training


def test_a_dropout_of_a_frozen_group_is_in_evaluation_mode():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9)), nn.Linear(4, 1))
    freezer = ModelFreezer(model)
    freezer.freeze(0, 0, set_modules_as_eval=True)
    assert not model[0][1].training
    set_training_mode(model)
    assert not model[0][1].training
    freezer.unfreeze()
    assert model[0][1].training


def test_unfreezing_returns_what_was_frozen_by_group(model):
    freezer = ModelFreezer(model)
    freezer.freeze()
    found = freezer.unfreeze(to_index=2)
    assert {name: len(params) for name, params in found.items()} == {"blocks.1": 2, "norm": 2}
    assert found["norm"] == [model.norm.weight, model.norm.bias]
    assert frozen(freezer) == ["blocks.0"]


def test_unfreezing_returns_nothing_twice(model):
    freezer = ModelFreezer(model)
    freezer.freeze()
    first, second = freezer.unfreeze(), freezer.unfreeze()
    assert list(first) == NAMES[:4]
    assert second == {}
    assert len(trainable(model)) == 12


def test_unfreezing_works_in_both_directions(model):
    freezer = ModelFreezer(model)
    freezer.freeze(to_index=-1)
    assert list(freezer.unfreeze(1, 2)) == list(NAMES[1:3])
    assert list(freezer.unfreeze(4, 3)) == list(NAMES[3:])


@pytest.mark.parametrize("trains", [True, False])
def test_unfreezing_sets_the_mode_if_asked_and_unfreezes_in_any_case(model, trains):
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    freezer.unfreeze(set_modules_as_training=trains)
    assert len(trainable(model)) == 12
    assert model.blocks[0].training is trains


def test_what_was_unfrozen_goes_into_an_optimizer(model):
    freezer = ModelFreezer(model)
    freezer.freeze()
    optimizer = torch.optim.SGD(freezer.get_trainable_parameters(), lr=0.1)
    for params in freezer.unfreeze().values():
        optimizer.add_param_group({"params": params, "lr": 0.01})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 12


def test_a_tied_parameter_is_in_a_group_once(model):
    model.blocks[1].weight = model.blocks[0].weight
    freezer = ModelFreezer(model)
    freezer.freeze(1, 2)
    assert list(freezer.unfreeze(1, 2)) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to_index": 5}, r"to_index is 5, but there are 5 layer groups: 'stem', .*-5 to 4"),
        ({"from_index": -6}, r"from_index is -6"),
    ],
)
def test_a_group_that_is_not_there_is_refused(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ModelFreezer(model).freeze(**arguments)


def test_a_model_without_parameters_has_no_group():
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        ModelFreezer(nn.ReLU()).unfreeze()
