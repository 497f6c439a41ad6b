import json

import pytest
import safetensors.torch
import torch
from torch import nn

from modelzoo_trainer import CheckpointError
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.lazy_weights import open_weights

WEIGHTS = {
    "w": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
    "deep": torch.arange(24.0).reshape(3, 2, 4),
    "one": torch.tensor(5),
}


@pytest.fixture(params=["file", "index", "bin", "bin index"])
def weights(request, tmp_path):
    if request.param == "file":
        safetensors.torch.save_file(WEIGHTS, tmp_path / "model.safetensors")
        return open_weights(tmp_path / "model.safetensors")
    if request.param == "bin":
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
        return open_weights(tmp_path)
    ending = "safetensors" if request.param == "index" else "bin"
    save = safetensors.torch.save_file if request.param == "index" else torch.save
    for name, tensor in WEIGHTS.items():
        save({name: tensor}, tmp_path / f"{name}.{ending}")
    places = {name: f"{name}.{ending}" for name in WEIGHTS}
    stem = "model" if request.param == "index" else "pytorch_model"
    index = tmp_path / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return open_weights(tmp_path)


def test_facts_are_known_and_tensors_are_read(weights):
    assert sorted(weights.names()) == sorted(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.dtype(name) is tensor.dtype
        found = weights.read(name)
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)
    with pytest.raises(KeyError):
        weights.shape("nothing")


def test_rows_are_those_of_the_tensor(weights):
    for name in ("w", "deep"):
        whole = WEIGHTS[name]
        for start, stop in [(0, len(whole)), (1, 3), (2, 2), (0, 1)]:
            assert torch.equal(weights.read_rows(name, start, stop), whole[start:stop])
    for name, start, stop in [("w", 2, 5), ("w", -1, 1), ("w", 2, 1), ("one", 0, 1)]:
        with pytest.raises(ValueError, match=f"tensor '{name}' of shape .* has no rows"):
            weights.read_rows(name, start, stop)


def test_what_is_read_belongs_to_the_caller(weights):
    weights.read("w").zero_()
    weights.read_rows("w", 0, 1).zero_()
    assert torch.equal(weights.read("w"), WEIGHTS["w"])


def test_nothing_but_the_rows_is_read(tmp_path, monkeypatch):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors")
    weights = open_weights(tmp_path / "x.safetensors")
    num_bytes, real = [], disk.read_at
    monkeypatch.setattr(
        disk, "read_at", lambda *args: num_bytes.append(real(*args)) or num_bytes[-1]
    )
    assert weights.names()
    weights.shape("deep")
    assert not num_bytes
    weights.read_rows("deep", 1, 2)
    assert num_bytes == [2 * 4 * 4]


def test_aliases_are_read_like_the_tensor_they_stand_for(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    weights = open_weights(tmp_path / "model.safetensors")
    assert sorted(weights.names()) == ["0.weight", "1.weight"]
    assert torch.equal(weights.read("1.weight"), weights.read_rows("0.weight", 0, 3))


@pytest.mark.parametrize("content", ["another", "none"])
def test_a_file_that_has_changed_since_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(WEIGHTS, path)
    weights = open_weights(path)
    if content == "another":
        safetensors.torch.save_file(WEIGHTS, tmp_path / "y.safetensors")
        (tmp_path / "y.safetensors").replace(path)
    else:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        weights.read("w")
