"""Checkpoints of every format that was ever written, kept as they were, still load."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.manifest import FORMAT_VERSION

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir() and path.name[0] == "v")


def load_contents():
    spec = importlib.util.spec_from_file_location("contents", SAMPLES / "contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(left, right):
    """Equal, with types, bits and the order of keys."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        assert all(same(left[key], right[key]) for key in left)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        assert all(map(same, left, right))
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
        assert torch.equal(*bits)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert left.hex() == right.hex()
        assert math.copysign(1, left) == math.copysign(1, right)
    else:
        assert left == right
    return True


def test_there_is_a_sample_of_every_format():
    assert [f"v{number}" for number in range(1, FORMAT_VERSION + 1)] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_checkpoint_loads_as_what_was_saved(version):
    contents = load_contents()
    path = SAMPLES / version / "checkpoint_7"
    assert checkpointing.verify(path) == []
    found = checkpointing.load(path)
    assert same(found, contents.state())
    assert found["model"]["embed.weight"] is found["model"]["head.weight"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_of_a_stored_checkpoint_is_read(version):
    found = checkpointing.read_manifest(SAMPLES / version / "checkpoint_7")
    assert found.format_version == int(version[1:])
    assert found.step == 7
    assert found.versions["torch"].startswith("2.13")
    assert "state.json" in found.files


def test_the_first_format_knows_neither_its_name_nor_facts():
    found = checkpointing.read_manifest(SAMPLES / "v1/checkpoint_7")
    assert (found.name, found.facts) == ("", {})


def test_the_second_format_knows_its_name_and_facts():
    found = checkpointing.read_manifest(SAMPLES / "v2/checkpoint_7")
    facts = {"run": "sample", "metrics": {"loss": 0.25, "best": None}}
    assert (found.name, found.facts) == ("checkpoint_7", facts)


def test_what_is_written_today_is_the_newest_sample_byte_for_byte(tmp_path):
    contents = load_contents()
    checkpointing.save(tmp_path / "checkpoint_7", contents.state(), step=contents.STEP)
    sample = SAMPLES / VERSIONS[-1] / "checkpoint_7"
    written = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint_7").iterdir()}
    stored = {file.name: file.read_bytes() for file in sample.iterdir()}
    assert written.keys() == stored.keys()
    del written["manifest.json"], stored["manifest.json"]
    assert written == stored
