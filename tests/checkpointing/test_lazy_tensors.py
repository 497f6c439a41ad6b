from copy import deepcopy

import pytest
import safetensors.torch
import torch
from torch import nn

from modelzoo_trainer import CheckpointError, CheckpointMismatch, Trainer
from modelzoo_trainer.checkpointing import disk, lazy_state, open_weights
from modelzoo_trainer.checkpointing.lazy_tensors import LazyTensor


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.fixture
def saved(tmp_path):
    """The state of a model, saved, and the path."""
    state = net().state_dict()
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    return state, tmp_path / "x.safetensors"


@pytest.fixture
def reads(monkeypatch):
    """The number of bytes of each read from the data of files."""
    found, real = [], disk.read_at

    def counting(fd, views, position):
        found.append(sum(map(len, views)))
        return real(fd, views, position)

    monkeypatch.setattr(disk, "read_at", counting)
    return found


def test_facts_need_no_read(saved, reads):
    state, path = saved
    for name, tensor in lazy_state(open_weights(path)).items():
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.shape, tensor.dtype) == (state[name].shape, state[name].dtype)
        assert (tensor.device, tensor.ndim, tensor.numel()) == (
            state[name].device,
            state[name].dim(),
            state[name].numel(),
        )
        assert tensor.is_floating_point() == torch.is_floating_point(state[name])
        assert not tensor.is_meta
        assert not tensor.requires_grad
        assert str(tensor.dtype) in repr(tensor)
    assert reads == []


def test_a_model_reads_each_tensor_once_and_keeps_none(saved, reads):
    state, path = saved
    lazy, model = lazy_state(open_weights(path)), net()
    model.load_state_dict(lazy)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert sorted(reads) == sorted(value.nbytes for value in state.values())
    assert all(tensor._kept is None for tensor in lazy.values())


def test_a_change_is_kept(saved):
    state, path = saved
    lazy = lazy_state(open_weights(path))
    lazy["0.weight"].mul_(2)
    lazy["0.bias"][1] = 7
    lazy["1.weight"].copy_(torch.full((3,), 5.0))
    with torch.no_grad():
        lazy["1.bias"].numpy()[:] = 3
    model = net()
    model.load_state_dict(lazy)
    found = model.state_dict()
    assert torch.equal(found["0.weight"], state["0.weight"] * 2)
    assert found["0.bias"][1] == 7
    assert (found["1.weight"] == 5).all()
    assert (found["1.bias"] == 3).all()


def test_operations_return_plain_tensors(saved):
    state, path = saved
    lazy = lazy_state(open_weights(path))
    weight, own = lazy["0.weight"], state["0.weight"]
    made = {
        "product": (weight * 2, own * 2),
        "of a list": (torch.cat([weight, weight]), torch.cat([own, own])),
        "cast": (weight.to(torch.bfloat16), own.to(torch.bfloat16)),
        "copy": (deepcopy(lazy)["0.weight"], own),
        "view": (weight.t(), own.t()),
        "rows": (lazy_state(open_weights(path))["0.weight"].read_rows(1, 2), own[1:2]),
        "changed rows": (weight.read_rows(1, 2), own[1:2]),
    }
    for name, (found, expected) in made.items():
        assert not isinstance(found, LazyTensor), name
        assert torch.equal(found, expected), name
    assert int(lazy["1.num_batches_tracked"]) == 0
    assert weight.tolist() == own.tolist()


def test_a_converted_tensor_is_read_when_it_is_needed(saved, reads):
    state, path = saved
    doubled = lazy_state(open_weights(path))["0.weight"].converted(lambda lazy: lazy.read() * 2)
    assert doubled.shape == (3, 4)
    assert reads == []
    target = torch.empty(3, 4)
    target.copy_(doubled)
    assert torch.equal(target, state["0.weight"] * 2)


class Changing(nn.Linear):
    """Another file lies at the path when the second tensor is read."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.path.write_bytes(b"")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_file_that_changes_while_it_is_loaded_is_named(saved, tmp_path):
    _, path = saved
    model = nn.Sequential(Changing(4, 3), nn.BatchNorm1d(3))
    model[0].path = path
    trainer = Trainer(device="cpu", model_dir=tmp_path / "run", model=model)
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*changed since it was opened"):
        trainer.load_checkpoint(path)


def test_what_does_not_fit_is_refused_before_anything_is_read(saved, reads, tmp_path):
    _, path = saved
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(5))
    before = deepcopy(model.state_dict())
    trainer = Trainer(device="cpu", model_dir=tmp_path / "run", model=model)
    with pytest.raises(CheckpointMismatch, match=r"other shape  1\.weight"):
        trainer.load_checkpoint(path)
    assert reads == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
