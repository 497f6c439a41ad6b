"""The tensor files, against the library that defines their format."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing.tensor_file import _NAMES, bytes_of, checked_tensors

DTYPES = sorted((dtype for dtype in _NAMES if not dtype.is_complex), key=str)


def read_tensors(path):
    return {name: tensor for _, name, tensor in checked_tensors(path, None, lambda name: True)}


def tensors_of(dtype):
    raw = torch.arange(240, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 251)
    whole = raw.view(dtype).reshape(2, -1)
    return {"a": whole, "strided": whole.t(), "scalar": whole[1, 1], "empty": whole[:, :0]}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write(path, tensors):
    path.write_bytes(b"".join(bytes_of(tensors)))
    return path


def same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        assert torch.equal(bits(tensor), bits(right[name]))
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_what_is_written(tmp_path, dtype):
    tensors = tensors_of(dtype)
    assert same(load_file(write(tmp_path / "x", tensors)), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_library_writes_is_read(tmp_path, dtype):
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors_of(dtype).items()}
    save_file(tensors, tmp_path / "x")
    assert same(read_tensors(tmp_path / "x"), tensors)


def test_a_single_element_of_a_column_is_written(tmp_path):
    element = torch.arange(6.0).reshape(3, 2)[1:2, 0]
    assert element.stride() == (2,)
    assert read_tensors(write(tmp_path / "x", {"a": element}))["a"].tolist() == [2]


def test_tensors_of_different_widths_are_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(3, dtype=torch.float64)}
    text = write(tmp_path / "x", tensors).read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"] for name in "ab"] == [[24, 27], [0, 24]]


def test_each_loaded_tensor_has_memory_of_its_own(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    found = read_tensors(write(tmp_path / "x", tensors))
    found["a"].fill_(7)
    sizes = [tensor.untyped_storage().nbytes() for tensor in found.values()]
    assert found["b"].tolist() == [1, 1, 1, 1]
    assert sizes == [16, 16]


def sealed(path, content):
    """Put `content` into the model's file, and a manifest that agrees with it."""
    (path / "model.safetensors").write_bytes(content)
    manifest = checkpointing.read_manifest(path)
    record = checkpointing.manifest.record_of(path / "model.safetensors")
    manifest.files["model.safetensors"] = record
    (path / "manifest.json").write_text(manifest.to_json())


def with_header(header):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        (4).to_bytes(8, "little") + b"null",
        with_header([]),
        with_header({"w": 3}),
        with_header({"w": ENTRY | {"dtype": "F31"}}),
        with_header({"w": ENTRY | {"shape": [5]}}),
        with_header({"w": ENTRY | {"shape": [-4]}}),
        with_header({"w": ENTRY | {"shape": "ab"}}),
        with_header({"w": ENTRY | {"shape": [2**70, 0], "data_offsets": [0, 0]}}),
        with_header({"w": ENTRY | {"data_offsets": [1, 17]}}),
        with_header({"w": ENTRY | {"data_offsets": [-16, 0]}}),
        with_header({"v": ENTRY}),
    ],
    ids=range(13),
)
def test_a_malformed_file_with_the_right_digest_is_one_clear_error(tmp_path, content):
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(4)}}, step=1)
    sealed(tmp_path / "c", content)
    assert checkpointing.verify(tmp_path / "c") == []
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpointing.load(tmp_path / "c")


def test_mutated_files_never_raise_another_error(tmp_path):
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(4), "v": torch.ones(2)}}, step=1)
    before = (tmp_path / "c/model.safetensors").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        mutated = bytearray(before)
        for _ in range(chance.randint(1, 4)):
            mutated[chance.randrange(len(before) - 24)] = chance.randrange(256)
        sealed(tmp_path / "c", bytes(mutated))
        try:
            checkpointing.load(tmp_path / "c")
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_nan_payloads_and_signed_zeros_keep_their_bits(tmp_path):
    values = np.array([0x7FF8000000000123, 0xFFF0000000000001, 1 << 63], np.uint64)
    state = {
        "t": torch.from_numpy(values.view(np.float64)),
        "f": list(map(float, values.view("d"))),
    }
    checkpointing.save(tmp_path / "c", {"x": state}, step=1)
    found = checkpointing.load(tmp_path / "c")["x"]
    assert torch.equal(found["t"].view(torch.int64), state["t"].view(torch.int64))
    assert np.array(found["f"]).tobytes() == np.array(state["f"]).tobytes()
    assert math.copysign(1, found["f"][2]) == -1
