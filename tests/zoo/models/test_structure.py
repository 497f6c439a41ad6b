"""Whether a model still has the modules and parameters that it had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer.core.parts.structure import ModelStructure


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(), nn.BatchNorm1d(2, affine=False))


CHANGES = {
    "a replaced parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a frozen parameter": lambda m: m[0].bias.requires_grad_(False),
    "a removed parameter": lambda m: m[0].register_parameter("bias", None),
    "a new parameter": lambda m: m[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a replaced module": lambda m: m.__setitem__(0, nn.Linear(2, 2)),
    "a new module": lambda m: m[1].append(nn.ReLU()),
    "a new buffer": lambda m: m[0].register_buffer("count", torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_structure_is_seen(change):
    changed = model()
    structure = ModelStructure(changed)
    change(changed)
    assert not structure.is_current()


def test_other_values_are_no_change():
    changed = model()
    structure = ModelStructure(changed)
    changed[0].weight.data = torch.ones(2, 2)
    changed[2].running_mean = torch.ones(2)
    changed.half().eval()
    assert structure.is_current()
