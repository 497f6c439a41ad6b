"""Every act of a save refused once, and what is left then."""

from __future__ import annotations

import errno
import os
import re
import stat

import numpy as np
import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import disk

STATE = {"model": {"w": torch.arange(64.0)}, "optimizer": {"m": torch.ones(3)}, "loss": 1.5}
NUM_ACTS = 24  # a folder; 4 files of open, 1 or 3 writes, sync, close; 3 around the rename
CODES = [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT]


def save(path):
    checkpointing.save(path, STATE, step=2)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_save_synchronises_everything_and_renames_once(tmp_path, counted):
    save(tmp_path / "c")
    assert counted.names.count("sync") == 4
    assert counted.names[-3:] == ["sync_folder", "rename", "sync_folder"]
    assert counted.names.count("rename") == 1
    assert [args[0] for name, args in counted.acts if name == "sync_folder"][1] == tmp_path
    assert checkpointing.load(tmp_path / "c")["loss"] == 1.5


def test_every_file_is_synchronised_before_the_manifest_is_begun(tmp_path, counted):
    save(tmp_path / "c")
    opened = [args[0].name for name, args in counted.acts if name == "open_new"]
    assert opened == ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
    per_file = [name for name in counted.names if name in ("open_new", "sync", "close")]
    assert per_file == ["open_new", "sync", "close"] * 4


def test_every_act_is_among_those_that_are_refused(tmp_path, counted):
    save(tmp_path / "c")
    assert len(counted.acts) == NUM_ACTS


@pytest.mark.parametrize("failing", range(1, NUM_ACTS + 1))
@pytest.mark.slow_cases(every=4)
def test_whatever_the_disk_refuses_nothing_is_left_and_earlier_checkpoints_load(
    tmp_path, refusing, failing
):
    checkpointing.save(tmp_path / "c_1", STATE, step=1)
    code = CODES[failing % len(CODES)]
    error = OSError(code, os.strerror(code))
    _, caught = refusing(failing, error, lambda: save(tmp_path / "c_2"))
    assert isinstance(caught, CheckpointError)
    assert f"c_2' could not be saved: {os.strerror(code)}" in str(caught)
    assert names(tmp_path) == ["c_1"]
    assert torch.equal(checkpointing.load(tmp_path / "c_1")["model"]["w"], torch.arange(64.0))
    save(tmp_path / "c_2")
    assert checkpointing.verify(tmp_path / "c_2") == []


@pytest.mark.parametrize("failing", range(1, NUM_ACTS + 1))
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.slow_cases(every=4)
def test_whatever_interrupts_a_save_goes_on_and_nothing_is_left(tmp_path, refusing, failing, kind):
    _, caught = refusing(failing, kind(), lambda: save(tmp_path / "c"))
    assert type(caught) is kind
    assert names(tmp_path) == []


def test_a_failed_sync_is_never_tried_again(tmp_path, refusing, counted):
    save(tmp_path / "c_1")
    first = counted.names.index("sync") + 1
    error = OSError(errno.EIO, "Input/output error")
    watched, caught = refusing(first, error, lambda: save(tmp_path / "c_2"))
    assert watched.names[first - 1] == "sync"
    assert watched.names[first:] == ["close"]
    assert isinstance(caught, CheckpointError)


def test_a_disk_that_writes_little_at_a_time_gets_it_all(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:100]))
    save(tmp_path / "c")
    monkeypatch.undo()
    assert torch.equal(checkpointing.load(tmp_path / "c")["model"]["w"], torch.arange(64.0))


def test_a_save_that_succeeds_deletes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "remove_tree", None)
    save(tmp_path / "c")
    assert checkpointing.verify(tmp_path / "c") == []


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_name_in_use_is_refused_whatever_has_it(tmp_path, kind):
    path = tmp_path / "c"
    {"file": path.touch, "folder": path.mkdir, "dangling link": lambda: path.symlink_to("no")}[
        kind
    ]()
    with pytest.raises(CheckpointError, match=r"c' already exists; .* never overwritten"):
        save(path)
    assert names(tmp_path) == ["c"]


def test_a_name_taken_while_files_are_written_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "c"
    real = disk.sync

    def take(fd):
        path.mkdir(exist_ok=True)
        real(fd)

    monkeypatch.setattr(disk, "sync", take)
    with pytest.raises(CheckpointError, match="never overwritten"):
        save(path)
    assert list(path.iterdir()) == []
    assert names(tmp_path) == ["c"]


def test_a_folder_in_which_nothing_can_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"file/c' could not be saved: .*file' is a file, not"
    ):
        save(tmp_path / "file" / "c")


def test_missing_folders_are_made_and_synchronised(tmp_path, counted):
    save(tmp_path / "a" / "b" / "c")
    synchronised = [args[0] for name, args in counted.acts if name == "sync_folder"]
    assert synchronised[:2] == [tmp_path, tmp_path / "a"]
    assert synchronised[-1] == tmp_path / "a" / "b"


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        save(tmp_path / "c")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "c").iterdir()}
    assert modes == {expected}
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o777 & ~umask


def test_there_is_no_pickle_in_a_checkpoint(tmp_path):
    checkpointing.save(tmp_path / "c", STATE | {"x": {1: (b"\x80", float("nan"))}}, step=1)
    expected = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(tmp_path / "c") == expected
    assert re.fullmatch(r"[\x20-\x7e\n]*", (tmp_path / "c/state.json").read_text())


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True, torch.tensor(0.5)])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    with pytest.raises(CheckpointError, match=r"step: expected an integer >= 0, got "):
        checkpointing.save(tmp_path / "c", STATE, step=step)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [0, np.int64(3), torch.tensor(3), 2**70])
def test_a_step_of_any_whole_kind_is_a_plain_number(tmp_path, step):
    checkpointing.save(tmp_path / "c", {}, step=step)
    assert type(checkpointing.read_manifest(tmp_path / "c").step) is int
    assert checkpointing.read_manifest(tmp_path / "c").step == int(step)


@pytest.mark.parametrize("facts", [{1: 2}, {"x": {None: 1}}, {"x": object()}, {"x": {1, 2}}])
def test_facts_that_are_not_plain_are_refused(tmp_path, facts):
    with pytest.raises(CheckpointError, match="facts cannot be saved"):
        checkpointing.save(tmp_path / "c", STATE, step=1, facts=facts)
    assert names(tmp_path) == []


def test_large_tensors_that_are_not_contiguous_are_written_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing.tensor_file, "_BLOCK", 1000)
    state = {
        "turned": torch.arange(10_000.0).reshape(100, 100).t(),
        "wide": torch.arange(4000.0).reshape(2, 2000).t().reshape(1, 2000, 2)[:, ::2],
        "grown": torch.arange(3.0).expand(500, 3),
        "images": torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    }
    checkpointing.save(tmp_path / "c", {"model": state}, step=1)
    found = checkpointing.load(tmp_path / "c")["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    longest = max(map(len, checkpointing.tensor_file.bytes_of({"x": state["turned"]})))
    assert longest <= 1000
