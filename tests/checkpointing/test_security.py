"""Checkpoints of somebody who means harm: nothing runs, nothing outside is touched, no surprise."""

from __future__ import annotations

import json
import os
import pickle
import random
import tracemalloc

import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import manifest as manifests

STATE = {
    "model": {"w": torch.arange(64.0), "v": torch.ones(2, 3, dtype=torch.int8), "e": torch.ones(0)},
    "rng": {"state": (1, [2.5, None, True], b"x"), "big": 1 << 80, "none": float("nan")},
    "global_step": 3,
}
FILES = ["manifest.json", "state.json", "model.safetensors"]
COUNTS = [700, pytest.param(70_000, marks=pytest.mark.soak)]
SLACK_BYTES = 100_000  # threads, messages


@pytest.fixture
def path(tmp_path):
    checkpointing.save(tmp_path / "c", STATE, step=3, facts={"run": "a"})
    return tmp_path / "c"


def seal(path):
    """Make the manifest agree with the files, as somebody would who means harm."""
    manifest = checkpointing.read_manifest(path)
    for name in manifest.files:
        manifest.files[name] = manifests.record_of(path / name)
    (path / "manifest.json").write_text(manifest.to_json())


class Payload:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def torch_pickle(payload, file):
    torch.save(payload, file)


def bare_pickle(payload, file):
    file.write_bytes(pickle.dumps(payload))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("write", [torch_pickle, bare_pickle])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_pickle_in_place_of_a_file_is_refused_and_never_run(
    path, tmp_path, name, write, is_sealed
):
    canary = tmp_path / "canary"
    write(Payload(canary), path / name)
    if is_sealed and name != "manifest.json":
        seal(path)
    with pytest.raises(CheckpointError):
        checkpointing.load(path)
    checkpointing.verify(path)
    checkpointing.list_checkpoints(tmp_path)
    assert not canary.exists()


def test_the_payload_would_have_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


# ---- links and other things that are no files


def test_a_linked_directory_is_refused(path, tmp_path):
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="c' is a symbolic link to"):
        checkpointing.load(path)
    assert checkpointing.verify(path)
    assert checkpointing.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_a_linked_file_is_refused_whatever_it_leads_to(path, tmp_path, name):
    (path / name).rename(tmp_path / "same_bytes")
    (path / name).symlink_to(tmp_path / "same_bytes")
    with pytest.raises(CheckpointError, match=r"is not a regular file|is a symbolic link"):
        checkpointing.load(path)
    assert len(checkpointing.verify(path)) == 1


def test_a_folder_in_place_of_a_file_is_refused(path):
    (path / "state.json").unlink()
    (path / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"'state\.json' is not a regular file"):
        checkpointing.load(path)


@pytest.mark.parametrize("extra", ["__init__.py", "model.pt", ".hidden", "x.json"])
def test_an_extra_file_is_refused(path, extra):
    (path / extra).write_text("x")
    with pytest.raises(CheckpointError, match=f"'{extra}' is not in the manifest"):
        checkpointing.load(path)


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "a/b.json", "..", "x.pt", "manifest"])
def test_a_draft_of_a_manifest_that_leads_outside_is_refused(path, name):
    manifest = checkpointing.read_manifest(path)
    manifest.files[name] = manifest.files["state.json"]
    (path / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
        checkpointing.load(path)


def test_a_state_that_names_a_file_outside_finds_nothing(path):
    state_json = {"x": {"__type__": "tensor", "file": "../c/model", "name": "w"}}
    (path / "state.json").write_text(json.dumps(state_json))
    seal(path)
    with pytest.raises(CheckpointError, match="cannot be read: KeyError"):
        checkpointing.load(path)


# ---- whatever is in the files, one kind of error and no more memory than they have

WILD = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, 1e308, "", "F32", "tensor", "w"),
    *([], {}, [0], [2**62, 4], [-1], [[]], {"__type__": "tensor"}, {"__type__": []}, [0, 2**40]),
    *({"__type__": "tuple", "items": []}, {"__type__": "int", "hex": "f" * 99}, "../model"),
]


def nodes(value, place=()):
    """Yield where everything in a JSON value is."""
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*place, key))


def changed_value(chance, value):
    """Return a copy with one to three things replaced, removed or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, 3)):
        found = [place for place in nodes(value) if place]
        if not found:
            break
        *place, last = chance.choice(found)
        holder = value
        for key in place:
            holder = holder[key]
        what = chance.random()
        if what < 0.7:
            holder[last] = json.loads(json.dumps(chance.choice(WILD)))
        elif what < 0.85:
            del holder[last]
        elif isinstance(holder, dict):
            holder[str(chance.choice(WILD))] = holder.pop(last)
    return value


def changed_bytes(chance, content):
    """Return a copy with some bytes replaced, removed or doubled."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 5)):
        begin = chance.randrange(len(content) + 1)
        end = min(len(content), begin + chance.randint(0, 6))
        kept = bytes(content[begin:end])
        new = [b"", kept * 2, chance.randbytes(end - begin), b"[" * 50, b"9" * 30, b'"', b"{}"]
        content[begin:end] = chance.choice(new)
    return bytes(content)


class Bound:
    """Asserts that loading costs no more memory than about twice the files."""

    def __init__(self, monkeypatch, path):
        checkpointing.load(path)  # what is imported counts for nothing
        tracemalloc.start()
        self.refused = 0
        self.loaded = 0
        self._taken = 0
        real = torch.empty

        def empty(shape, **kwargs):
            tensor = real(shape, **kwargs)
            self._taken += tensor.nbytes
            return tensor

        monkeypatch.setattr(torch, "empty", empty)

    def load(self, path):
        size = sum(file.stat().st_size for file in path.iterdir())
        self._taken = 0
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            checkpointing.load(path)
            self.loaded += 1
        except CheckpointError:
            self.refused += 1
        _, peak = tracemalloc.get_traced_memory()
        assert self._taken <= size
        assert peak - before <= 2 * size + SLACK_BYTES


@pytest.fixture
def bound(monkeypatch, path):
    yield Bound(monkeypatch, path)
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_manifest_says_the_error_is_one_kind(path, bound, count):
    chance = random.Random(1)
    file = path / "manifest.json"
    before = file.read_bytes()
    raw = json.loads(before)
    raw.pop("xxh3_128")
    for number in range(count):
        if number % 3:
            file.write_text(manifests._sealed(as_dict(changed_value(chance, raw))))
        else:
            file.write_bytes(changed_bytes(chance, before))
        bound.load(path)
        checkpointing.list_checkpoints(path.parent)
    assert bound.refused > count / 2


def as_dict(value):
    return value if isinstance(value, dict) else {"format_version": value}


@pytest.mark.slow_cases("700")
@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_state_says_the_error_is_one_kind(path, bound, count):
    chance = random.Random(2)
    file = path / "state.json"
    before = file.read_bytes()
    for number in range(count):
        if number % 3:
            file.write_text(json.dumps(changed_value(chance, json.loads(before))))
        else:
            file.write_bytes(changed_bytes(chance, before))
        seal(path)
        bound.load(path)
    assert bound.refused > count / 10
    assert bound.loaded > count / 10


@pytest.mark.slow_cases("700")
@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_header_says_the_error_is_one_kind(path, bound, count):
    chance = random.Random(3)
    file = path / "model.safetensors"
    before = file.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header, data = before[8 : 8 + length], before[8 + length :]
    for number in range(count):
        if number % 3:
            text = json.dumps(changed_value(chance, json.loads(header))).encode()
        else:
            text = changed_bytes(chance, header)
        told = (
            len(text) if chance.random() < 0.9 else chance.choice([0, 1, 2**32, 2**63, 2**64 - 1])
        )
        file.write_bytes(told.to_bytes(8, "little") + text + data)
        seal(path)
        bound.load(path)
    assert bound.refused > count / 2
