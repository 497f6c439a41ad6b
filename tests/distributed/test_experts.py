"""Mixtures of experts in several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modelzoo_trainer.zoo.models.experts import MixtureOfExperts
from modelzoo_trainer.zoo.models.moe_settings import read_moe
from tests.distributed.engines import WIDTH, Net, spread, train
from tests.distributed.ranks import run_ranks


class ExpertLayer(nn.Module):
    """A layer of `Net` with three experts: their number divides by no number of processes here."""

    def __init__(self) -> None:
        super().__init__()
        moe = read_moe({"num_experts": 3, "top_k": 2, "router_use_bias": True})
        self.mixture = MixtureOfExperts(moe, WIDTH, 2 * WIDTH, "swiglu", True, 0.0)
        for param in self.mixture.parameters():
            nn.init.normal_(param, std=0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int32)
        output, routing = self.mixture(hidden, ids, None)
        return hidden + output + (routing.probabilities**2).sum(-1)[:, None, None]


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.layers = nn.ModuleList(ExpertLayer() for _ in range(2)).double()
    return net


def train_sharded(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    model = make_net(seed=rank)
    module, part = spread(model, options)
    found = train(model, module, part)
    experts = model.layers[0].mixture.experts
    found["shapes"] = [
        tuple(param.to_local().shape) if isinstance(param, DTensor) else tuple(param.shape)
        for param in (experts.up, experts.down, experts.up_bias)
    ]
    return found


SHARDED_SHAPES = [(3, WIDTH, WIDTH), (3, WIDTH // 2, 2 * WIDTH), (2, 2 * WIDTH)]
WHOLE_SHAPES = [(3, 2 * WIDTH, WIDTH), (3, WIDTH, 2 * WIDTH), (3, 2 * WIDTH)]
ARRANGEMENTS = {
    "sharded": (2, {"parallel": {"shard": -1}}, SHARDED_SHAPES),
    "copies, sharded": (4, {"parallel": {"shard": 2}}, SHARDED_SHAPES),
    "copies": (2, {}, WHOLE_SHAPES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_training_equals_that_of_one_process(name: str) -> None:
    num, options, shapes = ARRANGEMENTS[name]
    model = make_net()
    expected = train(model, model)

    found = run_ranks(num, train_sharded, options)

    assert found[0].pop("shapes") == shapes
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-9)
