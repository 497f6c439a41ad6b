import json
import os
import stat

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.distributed import save_sharded
from modelzoo_trainer.checkpointing.weights import export, read_part, read_weights
from modelzoo_trainer.cli.checkpoints import main
from modelzoo_trainer.tools.checkpoints.compare import compare


class Tied(nn.Module):
    """An embedding whose weight is also that of the output, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.output = nn.Linear(3, 7, bias=False)
        self.output.weight = self.embedding.weight


def state_of(model):
    return {
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(7, 3)}}},
        "global_step": 3,
    }


def refuse(*args):
    raise OSError(28, "No space left on device")


@pytest.fixture(params=["one process", "shards"])
def path(request, tmp_path):
    torch.manual_seed(0)
    save = save_sharded if request.param == "shards" else checkpointing.save
    save(tmp_path / "checkpoint_3", state_of(Tied()), step=3)
    return tmp_path / "checkpoint_3"


def test_the_file_opens_with_the_library_under_the_names_of_the_state(path, tmp_path):
    assert export(path, tmp_path / "model.safetensors") == []
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model = checkpointing.load(path)["model"]
    assert found.keys() == model.keys() - {"output.weight"}
    assert compare({name: model[name] for name in sorted(found)}, dict(sorted(found.items()))) == []


def test_paths_may_be_strings(path, tmp_path):
    exported, written = tmp_path / "exported.safetensors", tmp_path / "written.safetensors"
    assert checkpointing.export(str(path), str(exported)) == []
    model = checkpointing.load(path)["model"]
    assert checkpointing.write_weights(model, str(written)) == []
    assert written.read_bytes() == exported.read_bytes()


def test_tied_weights_are_stored_as_the_librarys_loader_expects_them(path, tmp_path):
    export(path, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "output.weight": "embedding.weight"}
    model = Tied()
    safetensors.torch.load_model(model, tmp_path / "model.safetensors", strict=True)
    assert compare(checkpointing.load(path)["model"], dict(model.state_dict())) == []


def test_it_is_read_again_with_all_names(path, tmp_path):
    export(path, tmp_path / "model.safetensors")
    weights = read_weights(tmp_path / "model.safetensors")
    assert compare(checkpointing.load(path)["model"], weights) == []


def test_it_has_the_mode_of_the_umask_and_nothing_is_left_beside_it(path, tmp_path):
    before = os.umask(0o027)
    try:
        export(path, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "checkpoint_3",
        "model.safetensors",
    ]


def test_a_file_that_is_there_is_replaced_only_if_told(path, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"model\.safetensors' already exists\..*--force"):
        export(path, file)
    assert file.read_bytes() == b"mine"
    export(path, file, force=True)
    assert safetensors.torch.load_file(file)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "nowhere/model.safetensors"])
@pytest.mark.slow_cases(every=4)
def test_a_file_that_cannot_be_one_of_weights_is_refused(path, tmp_path, name):
    with pytest.raises(CheckpointError, match="must"):
        export(path, tmp_path / name)


@pytest.mark.parametrize("act", ["open_new", "write", "sync", "rename"])
def test_a_disk_that_refuses_leaves_things_as_they_were(path, tmp_path, monkeypatch, act):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"mine")
    monkeypatch.setattr(disk, act, refuse)
    with pytest.raises(CheckpointError, match=r"could not be written: No space left"):
        export(path, file, force=True)
    assert file.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_new_name_that_may_not_last_is_taken_back(path, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "sync_folder", refuse)
    with pytest.raises(CheckpointError, match=r"could not be written: No space left"):
        export(path, tmp_path / "model.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_3"]


def test_a_damaged_model_is_refused(path, tmp_path):
    (file,) = path.glob("*0.safetensors") if (path / "shards.json").exists() else path.glob("m*.s*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.name}.* is damaged"):
        export(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_damage_elsewhere_does_not_matter_to_the_model(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_3", state_of(Tied()), step=3)
    file = tmp_path / "checkpoint_3" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    export(tmp_path / "checkpoint_3", tmp_path / "model.safetensors")


def test_what_is_no_tensor_is_left_out_and_told(tmp_path):
    state = {"model": {"w": torch.ones(2), "_extra_state": {"a": 1}, "n": np.ones(2)}}
    checkpointing.save(tmp_path / "checkpoint_3", state, step=3)
    assert export(tmp_path / "checkpoint_3", tmp_path / "x.safetensors") == ["_extra_state.a", "n"]
    assert safetensors.torch.load_file(tmp_path / "x.safetensors").keys() == {"w"}


def test_complex_and_odd_tensors_are_exported_as_the_library_writes_them(tmp_path):
    state = {
        "c": torch.tensor([1 + 2j, 3j]),
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "s": torch.tensor(1.5),
        "e": torch.zeros(0, 3),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    checkpointing.save(tmp_path / "checkpoint_3", {"model": state}, step=3)
    export(tmp_path / "checkpoint_3", tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert compare(state, {name: found[name] for name in state}) == []
    assert compare(state, read_weights(tmp_path / "x.safetensors")) == []


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_3", {"global_step": 3}, step=3)
    with pytest.raises(CheckpointError, match="has no key 'model'"):
        export(tmp_path / "checkpoint_3", tmp_path / "x.safetensors")
    checkpointing.save(tmp_path / "checkpoint_4", {"model": {}}, step=3)
    with pytest.raises(CheckpointError, match="has no tensors"):
        export(tmp_path / "checkpoint_4", tmp_path / "x.safetensors")


def test_one_part_is_read_alone(path):
    assert compare(checkpointing.load(path)["optimizer"], read_part(path, "optimizer")) == []
    assert read_part(path, "global_step") == 3


def test_a_folder_that_is_a_checkpoint_is_no_folder_of_weights(path):
    with pytest.raises(CheckpointError, match=r"is a checkpoint.*export"):
        read_weights(path)


def test_the_header_is_plain_json_with_aligned_data(path, tmp_path):
    export(path, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["embedding.weight"]["dtype"] == "F32"


def test_a_state_in_memory_is_written_as_that_of_its_checkpoint(tmp_path):
    model = Tied()
    checkpointing.save(tmp_path / "checkpoint", state_of(model), step=3)
    export(tmp_path / "checkpoint", tmp_path / "read.safetensors")
    rest = checkpointing.write_weights(model.state_dict(), tmp_path / "written.safetensors")
    assert rest == []
    read, written = (tmp_path / f"{name}.safetensors" for name in ("read", "written"))
    assert read.read_bytes() == written.read_bytes()


def test_a_state_in_memory_replaces_no_file_and_leaves_none_if_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="no tensors"):
        checkpointing.write_weights({}, file)
    assert not list(tmp_path.iterdir())
    checkpointing.write_weights({"a": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="exists"):
        checkpointing.write_weights({"a": torch.ones(2)}, file)


def test_the_command_says_which_tied_weights_are_stored_once(path, tmp_path, capsys):
    assert main(["export", str(path), str(tmp_path / "model.safetensors")]) == 0
    said = capsys.readouterr().err
    assert "output.weight is saved as embedding.weight" in said
    assert "safetensors.torch.load_model" in said
