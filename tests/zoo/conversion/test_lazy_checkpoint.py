"""The model of a checkpoint, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.checkpointing import save
from modelzoo_trainer.checkpointing.distributed import save_sharded
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.conversion.lazy_checkpoint import open_model
from tests.distributed.engines import make_net, spread
from tests.distributed.ranks import run_ranks


def checked(path: Path, expected: dict[str, Tensor]) -> None:
    found = open_model(path)
    assert {*found.names()} == expected.keys()
    for name, tensor in expected.items():
        assert found.shape(name) == tuple(tensor.shape)
        assert found.dtype(name) == tensor.dtype
        assert torch.equal(found.read(name), tensor)
        assert torch.equal(found.read_rows(name, 1, 2), tensor[1:2])


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_each_tensor_is_read_from_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    state = dict(make_net().state_dict())  # with tied weights
    save(tmp_path / "checkpoint_1", {"model": state, "other": torch.ones(2)}, step=1)
    checked(tmp_path / "checkpoint_1", state)
    opened = open_model(tmp_path / "checkpoint_1")
    damage(tmp_path / "checkpoint_1/model.safetensors")
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        opened.read(opened.names()[0])


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_1", {"other": torch.ones(2)}, step=1)
    with pytest.raises(CheckpointError, match="no tensors under 'model'"):
        open_model(tmp_path / "checkpoint_1")


def write(rank: int, options: dict[str, Any], folder: Path) -> None:
    model = make_net()
    spread(model, options)
    save_sharded(folder / "checkpoint_1", {"model": model.state_dict()}, step=1)


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 3])
def test_each_tensor_is_read_from_a_checkpoint_of_several(num: int, tmp_path: Path) -> None:
    run_ranks(num, write, {"parallel": {"shard": -1}}, tmp_path)
    checked(tmp_path / "checkpoint_1", dict(make_net().state_dict()))
    damage(tmp_path / "checkpoint_1/shard-00001.safetensors")
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        checked(tmp_path / "checkpoint_1", dict(make_net().state_dict()))
