"""Tied weights of a sharded model are still tied in its checkpoint and in what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.distributed import save_sharded
from tests.distributed.engines import PLAN, make_net, spread
from tests.distributed.ranks import run_ranks

SHARD = {"parallel": {"shard": -1}}
ARRANGEMENTS = {
    "copies": (2, {}),
    "sharded": (2, SHARD),
    "uneven": (3, SHARD),
    "copies, sharded": (4, {"parallel": {"shard": 2}}),
    "split": (2, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}),
    "split, copies": (4, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}),
    "split, sharded": (4, {"parallel": {"tensor": 2, "shard": 2}, "tensor_plan": PLAN}),
}


def save(rank: int, options: dict[str, Any], folder: Path) -> None:
    model = make_net()
    spread(model, options)
    assert model.head.weight is model.embedding.weight
    state = {"model": model.state_dict()}
    save_sharded(folder / "checkpoint_1", state, step=1)
    saver = checkpointing.BackgroundSaver()
    group = dist.new_group(backend="gloo")
    saver.save_sharded(folder / "checkpoint_2", state, step=2, process_group=group)
    saver.wait()


# CI: copies, shards of equal and unequal size, and both ways to divide at once.
@pytest.mark.soak_cases("copies, sharded", "split", "split, copies")
@pytest.mark.slow
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_exported_model_loads_with_its_tied_weights(name: str, tmp_path: Path) -> None:
    num, options = ARRANGEMENTS[name]

    run_ranks(num, save, options, tmp_path)

    expected = make_net().state_dict()
    for step in (1, 2):
        path = tmp_path / f"model_{step}.safetensors"
        checkpointing.export(tmp_path / f"checkpoint_{step}", path)
        model = make_net(seed=1)
        load_model(model, path)  # refuses a file that has tied weights twice
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
