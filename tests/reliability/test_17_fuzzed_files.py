"""Manifest, state.json and safetensors headers changed at random, with matching checksums."""

from __future__ import annotations

import json
import random
import resource
import shutil
import tracemalloc
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from modelzoo_trainer.errors import CheckpointError
from tests.reliability.mutants import mutated, torn
from tests.reliability.sealing import MANIFEST, STATE, seal, write_manifest
from tests.reliability.states import make

TRIALS = [350, pytest.param(4_000, marks=pytest.mark.soak)]
MOST_BYTES = 12_000_000  # of checkpoints of a few KB: a buffer to read through


@pytest.fixture(autouse=True)
def _little_memory():
    """Let the process have half a GB more than it has, so that nothing huge is reserved."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**29, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def load(path: Path) -> bool:
    """Return whether it loads; only one kind of error is allowed, and little memory."""
    tracemalloc.start()
    try:
        checkpointing.load(path)
    except CheckpointError:
        return False
    else:
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES


def change_manifest(path: Path, generator: random.Random) -> None:
    manifest = json.loads((path / MANIFEST).read_text(encoding="ascii"))
    del manifest["xxh3_128"]
    write_manifest(path, mutated(manifest, generator))


def tear_manifest(path: Path, generator: random.Random) -> None:
    file = path / MANIFEST
    file.write_bytes(torn(file.read_bytes(), generator))


def change_state(path: Path, generator: random.Random) -> None:
    file = path / STATE
    file.write_text(json.dumps(mutated(json.loads(file.read_text()), generator)))
    seal(path)


def tear_state(path: Path, generator: random.Random) -> None:
    file = path / STATE
    file.write_bytes(torn(file.read_bytes(), generator))
    seal(path)


def change_header(path: Path, generator: random.Random) -> None:
    file = generator.choice(sorted(path.glob("*.safetensors")))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(json.loads(data[8:end]), generator)).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    seal(path)


def tear_tensors(path: Path, generator: random.Random) -> None:
    file = generator.choice(sorted(path.glob("*.safetensors")))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(torn(data[:end], generator) + data[end:])
    seal(path)


CHANGES = (change_manifest, tear_manifest, change_state, tear_state, change_header, tear_tensors)


@pytest.mark.slow_cases("350-change_*", "350-tear_state", "350-tear_tensors")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("trials", TRIALS)
def test_a_changed_file_is_refused_or_loads_and_nothing_else(
    tmp_path, count, change, trials
) -> None:
    good = make(tmp_path / "good", 1)[0]
    generator = random.Random(change.__name__)
    path = tmp_path / "run" / good.name
    path.parent.mkdir()
    loaded = 0
    for _ in range(trials):
        shutil.copytree(good, path)
        change(path, generator)
        loaded += load(path)
        shutil.rmtree(path)
    count(trials=trials, refused=trials - loaded)
    assert loaded < trials


@pytest.mark.parametrize("num_bytes", [2**40, 2**62])
def test_a_header_that_promises_more_than_there_is_takes_no_memory(tmp_path, count, num_bytes):
    path = make(tmp_path, 1)[0]
    file = sorted(path.glob("*.safetensors"))[0]
    entry = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weight": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    seal(path)
    assert not load(path)
    count(trials=1, refused=1)
