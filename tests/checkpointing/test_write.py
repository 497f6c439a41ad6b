"""Every operation of a save refused once, and what is left then."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing

STATE = {"model": {"w": torch.arange(64.0)}, "optimizer": {"m": torch.ones(3)}, "loss": 1.5}


class Disk:
    """Counts mkdir, open, write, sync and rename; refuses one of them."""

    def __init__(self, monkeypatch, failing):
        self.calls = []
        self.failing = failing
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))
        real_open = Path.open

        def open_counted(path, *args, **kwargs):
            self.count("open")
            file = real_open(path, *args, **kwargs)
            return File(self, file) if args and args[0] == "xb" else file

        monkeypatch.setattr(Path, "open", open_counted)

    def counted(self, name, real):
        def call(*args, **kwargs):
            self.count(name)
            return real(*args, **kwargs)

        return call

    def count(self, name):
        self.calls.append(name)
        if len(self.calls) == self.failing:
            raise OSError(28, "No space left on device")


class File:
    """A file that writes half of what it is given when the disk refuses."""

    def __init__(self, disk, file):
        self.disk = disk
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.disk.count("write")
        return len(data) // 2 + self.file.write(data[len(data) // 2 :])


def operations(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, failing=0)
        checkpointing.save(tmp_path / "c", STATE, step=1)
    return disk.calls


def test_a_save_synchronises_everything_and_renames_once(tmp_path):
    calls = operations(tmp_path)
    assert calls.count("fsync") == 6  # four files, the directory, its parent
    assert calls[-2:] == ["rename", "fsync"]
    assert calls.count("rename") == 1
    assert checkpointing.load(tmp_path / "c")["loss"] == 1.5


@pytest.mark.parametrize("failing", range(1, 21))
def test_whatever_the_disk_refuses_nothing_is_left_and_earlier_checkpoints_load(tmp_path, failing):
    checkpointing.save(tmp_path / "c_1", STATE, step=1)
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, failing)
        with pytest.raises(CheckpointError) as caught:
            checkpointing.save(tmp_path / "c_2", STATE, step=2)
    assert "c_2' could not be written: No space left on device. Earlier" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c_1"]
    assert torch.equal(checkpointing.load(tmp_path / "c_1")["model"]["w"], torch.arange(64.0))
    checkpointing.save(tmp_path / "c_2", STATE, step=2)
    assert checkpointing.verify(tmp_path / "c_2") == []


def test_every_operation_is_among_those_that_were_refused(tmp_path):
    assert len(operations(tmp_path)) == 20


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpointing.save(tmp_path / "c", STATE, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_succeeds_deletes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing.write.shutil, "rmtree", None)
    checkpointing.save(tmp_path / "c", STATE, step=1)
    assert checkpointing.verify(tmp_path / "c") == []


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_name_in_use_is_refused_whatever_has_it(tmp_path, kind):
    path = tmp_path / "c"
    {"file": path.touch, "folder": path.mkdir, "dangling link": lambda: path.symlink_to("no")}[
        kind
    ]()
    with pytest.raises(CheckpointError, match=r"c' exists; checkpoints are never overwritten"):
        checkpointing.save(path, STATE, step=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_name_taken_while_files_are_written_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "c"
    real = os.fsync

    def take(descriptor):
        path.mkdir(exist_ok=True)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", take)
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpointing.save(path, STATE, step=1)
    assert list(path.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_folder_in_which_nothing_can_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file/c' could not be written: File exists"):
        checkpointing.save(tmp_path / "file" / "c", STATE, step=1)


def test_missing_folders_are_made_and_synchronised(tmp_path, monkeypatch):
    synchronised = []
    real = checkpointing.write._sync
    monkeypatch.setattr(
        checkpointing.write, "_sync", lambda path: (synchronised.append(path), real(path))
    )
    checkpointing.save(tmp_path / "a" / "b" / "c", STATE, step=1)
    assert synchronised[:2] == [tmp_path, tmp_path / "a"]
    assert synchronised[-1] == tmp_path / "a" / "b"


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        checkpointing.save(tmp_path / "c", STATE, step=1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "c").iterdir()}
    assert modes == {expected}
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o777 & ~umask


def test_there_is_no_pickle_in_a_checkpoint(tmp_path):
    checkpointing.save(tmp_path / "c", STATE | {"x": {1: (b"\x80", float("nan"))}}, step=1)
    names = sorted(file.name for file in (tmp_path / "c").iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert re.fullmatch(r"[\x20-\x7e\n]*", (tmp_path / "c/state.json").read_text())
