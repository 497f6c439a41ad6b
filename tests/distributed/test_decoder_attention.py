"""Every option of attention and positions, split and sharded over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backends.errors import BackendError
from modelzoo_trainer.zoo.models.decoder import Decoder
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks
from tests.zoo.models.attention_options import ALIBI, LENGTH, OPTIONS, batch_for, make, tokens

SPLIT = {"parallel": {"tensor": -1}}
SHARD = {"parallel": {"shard": -1}}


def learn(model: Decoder, batch: dict[str, Tensor]) -> dict[str, Any]:
    model.requested_outputs = ("logits",)
    outputs = model(batch)
    outputs["loss"].backward()
    gradients = {
        name: whole(param.grad).numpy()
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return {"logits": outputs["logits"].detach().to(torch.float64).numpy(), "gradients": gradients}


def generate_spread(rank: int, engine: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, changes in OPTIONS.items():
        model = make(**changes).double()
        spread(model, engine)
        found[name] = model.generate(tokens(2, 3), LENGTH, temperature=0).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", [SPLIT, SHARD], ids=["split", "sharded"])
def test_two_processes_generate_the_tokens_of_one(engine: dict[str, Any]) -> None:
    expected = {
        name: make(**changes).double().generate(tokens(2, 3), LENGTH, temperature=0).tolist()
        for name, changes in OPTIONS.items()
    }

    assert run_ranks(2, generate_spread, engine) == [expected] * 2


def learn_spread(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, changes in OPTIONS.items():
        model = make(**changes).double()
        spread(model, options)
        found[name] = learn(model, batch_for(changes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPLIT, SHARD], ids=["tensor", "sharded"])
def test_logits_and_gradients_are_those_of_one_process(options: dict[str, Any]) -> None:
    expected = {
        name: learn(make(**changes).double(), batch_for(changes))
        for name, changes in OPTIONS.items()
    }
    assert "position_bias.slopes.weight" in expected["trained slopes"]["gradients"]
    assert "position_bias.buckets.weight" in expected["relative"]["gradients"]

    found = run_ranks(2, learn_spread, options)

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)


def logits_in_bfloat16(rank: int) -> dict[str, Any]:
    found = {}
    for name, changes in OPTIONS.items():
        model = make(**changes)
        spread(model, SHARD | {"sharding": {"param_dtype": "bfloat16"}})
        found[name] = learn(model, batch_for(changes))
    return found


@pytest.mark.slow
def test_sharded_parameters_can_be_used_in_bfloat16() -> None:
    (found, _) = run_ranks(2, logits_in_bfloat16)

    for name, changes in OPTIONS.items():
        expected = learn(make(**changes), batch_for(changes))
        error = torch.tensor(found[name]["logits"]) - torch.tensor(expected["logits"])
        assert error.norm() < 0.03 * torch.tensor(expected["logits"]).norm(), name


def place_of_slopes(rank: int) -> tuple[list[int], str]:
    model: Any = make(**ALIBI)
    spread(model, SPLIT)
    with pytest.raises(BackendError) as caught:
        spread(make(num_heads=1, **ALIBI), SPLIT)
    return list(model.position_bias.slopes.weight.to_local().shape), str(caught.value)


@pytest.mark.slow
def test_each_process_has_the_slopes_of_its_heads() -> None:
    for shape, message in run_ranks(2, place_of_slopes):
        assert shape == [2, 1]
        assert "backend.parallel.tensor is 2" in message
