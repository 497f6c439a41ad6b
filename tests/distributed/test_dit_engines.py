"""Diffusion transformers, split and sharded over two processes, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from modelzoo_trainer.zoo.models.vision.dit import Dit
from tests.distributed.engines import spread, two_steps
from tests.distributed.ranks import run_ranks
from tests.zoo.models.dit_cases import CASES, batch_of, make

ENGINES = {"split": {"parallel": {"tensor": -1}}, "sharded": {"parallel": {"shard": -1}}}


def learn(model: Dit) -> dict[str, Any]:
    batch = batch_of()
    return two_steps(
        model,
        {name: one.double() if one.is_floating_point() else one for name, one in batch.items()},
    )


def learn_spread(rank: int, case: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(case).double()
    spread(model, options)
    assert isinstance(model.layers[0].attention.k_proj.weight, DTensor)
    assert isinstance(model.layers[0].ffn_norm.scale.weight, DTensor)
    return learn(model)


# CI: one model of each kind split, as that is written for each kind; sharding is of any module:
# one model.
@pytest.mark.soak_cases("*-sharded", "linear, learned-*", "!dit-sharded")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_two_processes_equals_one(case: str, engine: str) -> None:
    expected = learn(make(case).double())

    found = run_ranks(2, learn_spread, case, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)


def mixed(rank: int) -> float:
    model = make("dit")
    spread(model, {"parallel": {"shard": -1}, "sharding": {"param_dtype": "bfloat16"}})
    loss = model(batch_of())["loss"]
    loss.backward()
    return loss.item()


@pytest.mark.slow
def test_sharded_parameters_may_be_of_a_smaller_type() -> None:
    expected = make("dit")(batch_of())["loss"].item()
    for loss in run_ranks(2, mixed):
        assert loss == pytest.approx(expected, rel=0.02)
