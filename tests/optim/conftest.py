from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer.optim import OPTIMIZERS
from modelzoo_trainer.optim.optimizer import GroupOptimizer

OWN_STEP = [
    name for name, cls in OPTIMIZERS.items() if cls.step.__module__.startswith("modelzoo_trainer")
]
"""Optimizers whose step is not torch's."""
OWN_UPDATE = [name for name, cls in OPTIMIZERS.items() if issubclass(cls, GroupOptimizer)]
"""Optimizers whose step calls nothing of torch's optimizers."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sgd():
    """An optimizer with two groups, tagged a and b."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [param], "tags": [tag]} for param, tag in zip(params, "ab", strict=True)]
    return torch.optim.SGD(groups, lr=0.5, weight_decay=0.25)
