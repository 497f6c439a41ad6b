"""Optimizers whose updates are those of one process where each holds a part of the state."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from modelzoo_trainer.optim.registry import OPTIMIZERS
from tests.distributed.engines import PLAN, make_net, train, train_parallel
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow

UNEQUAL = {
    "Muon",  # orthogonalizes in bfloat16
    "Rprop",  # torch's writes in place by a mask, which a DTensor refuses
}
EQUAL = (*sorted(OPTIMIZERS.keys() - UNEQUAL), "AdamW, fused")


def maker(name: str) -> Any:
    if name == "AdamW, fused":
        cls = OPTIMIZERS["AdamW"]
        return lambda params: cls([{"params": params, "fused": True}], lr=0.01, weight_decay=0.1)
    cls = OPTIMIZERS[name]
    key = "lr" if "lr" in inspect.signature(cls).parameters else "learning_rate"
    return lambda params: cls(params, **{key: 0.01})


def train_all(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: train_parallel(rank, options, make_net(), make_optimizer=maker(name))["weights"]
        for name in EQUAL
    }


@pytest.mark.parametrize(
    "options",
    [{"parallel": {"shard": 2}}, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}],
    ids=["sharded", "split"],
)
def test_the_weights_are_those_of_one_process(options: dict[str, Any]) -> None:
    expected = {}
    for name in EQUAL:
        model = make_net()
        expected[name] = train(model, model, make_optimizer=maker(name))["weights"]

    found = run_ranks(2, train_all, options)

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-11, atol=1e-11)
