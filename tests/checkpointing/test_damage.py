import json
import os
import random
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import write

STATE = {"model": {"w": torch.arange(64.0)}, "global_step": 3, "x": {"loss": 1.5}}


@pytest.fixture
def path(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_3", STATE, step=3)
    return tmp_path / "checkpoint_3"


def test_it_is_intact_as_it_was_written(path):
    assert checkpointing.verify(path) == []
    assert checkpointing.read_manifest(path).step == 3


def test_every_flipped_bit_is_found(path):
    chance = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(200):
        file = chance.choice(files)
        before = file.read_bytes()
        damaged = bytearray(before)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        assert checkpointing.verify(path), file
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_truncated_file_is_named(path, name):
    file = path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"'{name}' has .* bytes instead of"):
        checkpointing.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_missing_file_is_named(path, name):
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        checkpointing.load(path)


def test_an_extra_file_is_refused(path):
    (path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"'optimizer\.safetensors' does not belong to it"):
        checkpointing.load(path)


def test_a_link_in_place_of_a_file_is_refused(path, tmp_path):
    target = tmp_path / "elsewhere"
    (path / "state.json").rename(target)
    (path / "state.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"'state.json' is not a plain file"):
        checkpointing.load(path)


def test_a_directory_without_a_manifest_was_never_committed(path):
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="never committed"):
        checkpointing.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format_version": 1}', "null"])
def test_a_broken_manifest_is_one_clear_error(path, content):
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"cannot be (read|used)"):
        checkpointing.load(path)


def test_another_format_version_is_refused(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format version 99; this version reads 1"):
        checkpointing.load(path)


def test_a_name_that_leads_outside_is_refused(path):
    found = checkpointing.read_manifest(path)
    found.files["../state.json"] = found.files.pop("state.json")
    (path / "manifest.json").write_text(found.to_json())
    with pytest.raises(CheckpointError, match=r"names '\.\./state\.json', which leads outside"):
        checkpointing.load(path)


def test_a_checkpoint_is_never_overwritten(path):
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpointing.save(path, {}, step=4)
    assert checkpointing.load(path)["global_step"] == 3


@pytest.mark.parametrize("failing", range(6))
def test_a_refusing_disk_leaves_nothing_behind(path, tmp_path, monkeypatch, failing):
    calls = 0
    real = os.fsync

    def refuse(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if failing == 5:  # the rename instead of a sync
        monkeypatch.setattr(os, "fsync", real)
        monkeypatch.setattr(Path, "rename", _refuse_rename)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpointing.save(tmp_path / "checkpoint_4", STATE, step=4)
    monkeypatch.undo()
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoint_3"}
    assert not checkpointing.verify(path)


def _refuse_rename(self, target):
    raise OSError(28, "No space left on device")


def test_everything_is_synchronised_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = write._sync, Path.rename
    monkeypatch.setattr(write, "_sync", lambda p: (events.append(p.name), real_sync(p)))
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (events.append("rename"), real_rename(self, to))[1]
    )
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(1)}}, step=1)
    assert events[:3] == ["model.safetensors", "state.json", "manifest.json"]
    assert events[3].startswith(".tmp-c-")
    assert events[4:] == ["rename", tmp_path.name]
