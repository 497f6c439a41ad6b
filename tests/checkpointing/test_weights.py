import json
import os
import pickle
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from modelzoo_trainer import CheckpointError
from modelzoo_trainer.checkpointing.tensor_header import DTYPES
from modelzoo_trainer.checkpointing.weights import holds_weights, read_weights

WEIGHTS = {"b": torch.arange(3.0), "w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}


def same(left, right):
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype is right[name].dtype
        assert tensor.shape == right[name].shape
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8))
    return True


def sharded(folder: Path, **changes: str) -> Path:
    folder.mkdir()
    safetensors.torch.save_file({"b": WEIGHTS["b"]}, folder / "model-1.safetensors")
    safetensors.torch.save_file({"w": WEIGHTS["w"]}, folder / "model-2.safetensors")
    places = {"b": "model-1.safetensors", "w": "model-2.safetensors"} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def with_header(path: Path, header: object, num_bytes: int = 12) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


class Payload:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_file_of_the_library_is_read(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors")
    assert same(dict(sorted(read_weights(tmp_path / "x.safetensors").items())), WEIGHTS)


@pytest.mark.parametrize("dtype", sorted({name for name, _ in DTYPES.values()}))
def test_every_dtype_comes_back(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8) % 2 if dtype == "bool" else torch.arange(64.0)
    tensor = raw.to(torch.uint8).view(getattr(torch, dtype))
    safetensors.torch.save_file({"x": tensor, "empty": tensor[:0]}, tmp_path / "x.safetensors")
    found = read_weights(tmp_path / "x.safetensors")
    assert same({"x": found["x"], "empty": found["empty"]}, {"x": tensor, "empty": tensor[:0]})


def test_the_table_of_dtypes_is_right():
    assert all(getattr(torch, dtype).itemsize == size for dtype, size in DTYPES.values())


def test_a_folder_with_one_file_is_read(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert read_weights(tmp_path).keys() == WEIGHTS.keys()


def test_a_folder_with_shards_is_read_and_so_is_its_index(tmp_path):
    folder = sharded(tmp_path / "big")
    assert same(dict(sorted(read_weights(folder).items())), WEIGHTS)
    assert read_weights(folder / "model.safetensors.index.json").keys() == WEIGHTS.keys()


def test_links_to_files_are_followed_as_a_download_cache_has_them(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert read_weights(tmp_path / "snapshot").keys() == WEIGHTS.keys()


def test_tied_weights_are_there_under_all_their_names(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    model.load_state_dict(read_weights(tmp_path / "model.safetensors"), strict=True)


def test_what_is_read_does_not_change_with_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1000)}, path)
    found = read_weights(path)
    with path.open("r+b") as file:
        file.seek(-400, os.SEEK_END)
        file.write(bytes(400))
    path.write_bytes(b"")
    assert torch.equal(found["w"], torch.ones(1000))


@pytest.mark.parametrize("name", ["x.pkl", "x.pickle"])
def test_a_pickle_is_refused_and_never_run(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"is a pickle, which may run code .*save_model"):
        read_weights(tmp_path / name)
    assert not Path("ran").exists()


def test_a_pickle_under_another_name_is_refused_and_never_run(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_weights(tmp_path)
    assert not Path("ran").exists()


def test_a_folder_with_a_pickle_only_says_what_to_do(tmp_path):
    (tmp_path / "model.pkl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only 'model\.pkl', a pickle.*convert it"):
        read_weights(tmp_path)


def test_a_folder_with_other_files_names_them(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"one of its files: adapter\.safetensors"):
        read_weights(tmp_path)


@pytest.mark.parametrize("place", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "b"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, place):
    with pytest.raises(CheckpointError, match=r"\.safetensors or \.bin"):
        read_weights(sharded(tmp_path / "big", b=place))


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"lists the tensor 'c' in 'model-1\.safetensors', but"
    ):
        read_weights(sharded(tmp_path / "big", c="model-1.safetensors"))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model-3\.safetensors' cannot be read"):
        read_weights(sharded(tmp_path / "big", w="model-3.safetensors"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"b": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    folder = sharded(tmp_path / "big")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(folder)


def entry(shape=(3,), offsets=(0, 12), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"w": entry(offsets=[0, 16], shape=[4])}, "has 12 bytes of data, expected 16"),
        ({"w": entry(offsets=[0, 8], shape=[2])}, "has 12 bytes of data, expected 8"),
        ({"w": entry(), "v": entry()}, "starts at byte 0 of the data, expected 12"),
        ({"w": entry(shape=[4])}, "does not match its offsets"),
        ({"w": entry(shape=[-3])}, "invalid shape"),
        ({"w": entry(shape=[1 << 64, 0], offsets=[0, 0])}, "invalid shape"),
        ({"w": entry(shape=[1] * 65, offsets=[0, 4])}, "invalid shape"),
        ({"w": entry(shape=[True], offsets=[0, 4])}, "invalid shape"),
        ({"w": entry(dtype="F33")}, "has dtype 'F33'; supported: BOOL"),
        ({"w": 3}, "invalid entry for tensor 'w'"),
        ({"__metadata__": {"a": 1}, "w": entry()}, "object of strings"),
        ([], "is not a JSON object"),
        (b'{"w": 1, "w": 2}', "name 'w' twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, header, says):
    with pytest.raises(CheckpointError, match=says):
        read_weights(with_header(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1])
def test_a_length_that_does_not_fit_is_refused(tmp_path, length):
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_weights(tmp_path / "x.safetensors")


@pytest.mark.slow
def test_damaged_files_raise_nothing_but_the_one_error(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(WEIGHTS, path)
    whole = path.read_bytes()
    chance = random.Random(0)
    num_refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
        try:
            read_weights(path)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 500


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.safetensors' does not exist"):
        read_weights(tmp_path / "nothing.safetensors")


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is neither a file nor a folder"):
        read_weights(tmp_path / "x.safetensors")


def test_files_and_folders_of_weights_are_told_from_checkpoints(tmp_path):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors")
    assert holds_weights(tmp_path / "x.safetensors")
    assert holds_weights(sharded(tmp_path / "big"))
    assert not holds_weights(tmp_path / "nothing")
    (tmp_path / "old").mkdir()
    assert not holds_weights(tmp_path / "old")
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    assert holds_weights(tmp_path / "old")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "shards.json"])
def test_a_checkpoint_without_some_of_its_files_is_no_folder_of_weights(tmp_path, name):
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / name).write_text("{}")
    assert not holds_weights(tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint, not a folder of weights"):
        read_weights(tmp_path)


def test_a_checkpoint_that_is_being_written_is_no_folder_of_weights(tmp_path):
    folder = tmp_path / ".tmp-checkpoint_1-1-ab"
    folder.mkdir()
    safetensors.torch.save_file(WEIGHTS, folder / "model.safetensors")
    assert not holds_weights(folder)
    with pytest.raises(CheckpointError, match="is a checkpoint, not a folder of weights"):
        read_weights(folder)
