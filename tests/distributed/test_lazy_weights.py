"""Files of weights, loaded into a sharded model: each rank reads its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from backends.parallel.fsdp import distribute
from modelzoo_trainer.checkpointing import disk, lazy_state, open_weights
from tests.distributed.engines import PLAN, make_net, spread, whole
from tests.distributed.ranks import run_ranks

SHARD = {"parallel": {"shard": -1}}
ARRANGEMENTS = {
    "sharded": (2, SHARD),
    "uneven": (3, SHARD),
    "copies, sharded": (4, {"parallel": {"shard": 2}}),
    "split": (2, {"parallel": {"tensor": 2}, "tensor_plan": PLAN}),
    "split, sharded": (4, {"parallel": {"tensor": 2, "shard": 2}, "tensor_plan": PLAN}),
}


def load(rank: int, options: dict[str, Any], path: Path) -> tuple[bool, int, int]:
    """Return whether the weights are those of the file, the bytes read, and those of the shards."""
    num_bytes, real = [0], disk.read_at

    def counting(fd: int, views: list[memoryview], position: int) -> int:
        num_bytes[0] += sum(map(len, views))
        return real(fd, views, position)

    model = make_net(seed=1)
    spread(model, options)
    own = model.state_dict()
    disk.read_at = counting
    state: dict[str, Any] = lazy_state(open_weights(path))
    model.load_state_dict(
        {
            name: distribute(value, own[name]) if type(own[name]) is not Tensor else value
            for name, value in state.items()
        }
    )
    read = num_bytes[0]
    expected = make_net(seed=2).state_dict()
    is_equal = all(torch.equal(whole(own[name]), value) for name, value in expected.items())
    parts = (value if type(value) is Tensor else value.to_local() for value in own.values())
    return is_equal, read, sum(part.nbytes for part in parts)


@pytest.mark.slow_cases("uneven", "copies, sharded", "split", "split, sharded")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_each_rank_reads_its_rows(name: str, tmp_path: Path) -> None:
    num, options = ARRANGEMENTS[name]
    safetensors.torch.save_model(make_net(seed=2), str(tmp_path / "x.safetensors"))

    found = run_ranks(num, load, options, tmp_path / "x.safetensors")

    assert all(is_equal for is_equal, _, _ in found)
    if "split" not in name:  # there, some are split by columns, and read in full
        assert [read for _, read, _ in found] == [parts for _, _, parts in found]
