"""The folder of checkpoints: what is found, what is removed, and what is left alone."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import disk

PATTERN = re.compile(r"checkpoint_\d+(_\d+)?")


def save(folder, *steps):
    for step in steps:
        path = folder / f"checkpoint_{step}"
        checkpointing.save(path, {"model": {"w": torch.ones(step % 7)}}, step=step)
    return path


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# ---- candidates


def test_candidates_are_the_newest_first(tmp_path):
    save(tmp_path, 100, 20, 3)
    checkpointing.save(tmp_path / "checkpoint_20_2", {}, step=20)
    checkpointing.save(tmp_path / "other_200", {}, step=200)
    found = [path.name for path in checkpointing.candidates(tmp_path, PATTERN)]
    assert found == ["checkpoint_100", "checkpoint_20_2", "checkpoint_20", "checkpoint_3"]


def test_what_cannot_be_read_is_a_candidate_where_its_name_stands(tmp_path):
    save(tmp_path, 10, 20, 30, 40)
    (tmp_path / "checkpoint_30/manifest.json").write_text("{")
    (tmp_path / "checkpoint_40/manifest.json").unlink()
    (tmp_path / "checkpoint_5").mkdir()
    (tmp_path / "checkpoint_99").write_text("a file")
    (tmp_path / "checkpoint_98").symlink_to("checkpoint_10")
    found = [path.name for path in checkpointing.candidates(tmp_path, PATTERN)]
    expected = [
        "checkpoint_98",
        "checkpoint_40",
        "checkpoint_30",
        "checkpoint_20",
        "checkpoint_10",
        "checkpoint_5",
    ]
    assert found == expected
    assert [info.step for info in checkpointing.list_checkpoints(tmp_path)] == [10, 20]


def test_a_folder_that_is_not_there_has_no_candidates(tmp_path):
    assert checkpointing.candidates(tmp_path / "none", PATTERN) == []


# ---- delete


def test_a_deleted_checkpoint_is_gone(tmp_path):
    save(tmp_path, 1, 2)
    checkpointing.delete(tmp_path / "checkpoint_1")
    assert names(tmp_path) == ["checkpoint_2"]


def test_a_damaged_checkpoint_can_be_deleted(tmp_path):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text("{")
    checkpointing.delete(path)
    assert names(tmp_path) == []


def test_a_checkpoint_is_whole_until_it_has_another_name_that_is_safe(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    acts = []
    real = disk.rename, disk.sync_folder, disk.remove_tree
    monkeypatch.setattr(disk, "rename", lambda *a: (acts.append("rename"), real[0](*a)))
    monkeypatch.setattr(disk, "sync_folder", lambda *a: (acts.append("sync"), real[1](*a)))
    monkeypatch.setattr(disk, "remove_tree", lambda *a: (acts.append("remove"), real[2](*a)))
    checkpointing.delete(path)
    assert acts == ["rename", "sync", "remove"]


def make_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("x")


def make_own_data(path):
    path.mkdir()
    (path / "data.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_folder, r"contains 'thesis\.tex', which is not part"),
        (make_own_data, r"has neither manifest\.json nor state\.json"),
        (lambda path: path.mkdir(), r"has neither manifest\.json nor state\.json"),
        (lambda path: path.write_text("x"), "is not a directory"),
        (lambda path: path.symlink_to("checkpoint_1"), "is a symbolic link to 'checkpoint_1'"),
        (lambda path: None, "does not exist"),
    ],
    ids=["a folder", "JSON", "empty", "a file", "a link", "nothing"],
)
def test_what_is_no_checkpoint_is_not_deleted(tmp_path, make, message):
    save(tmp_path, 1)
    make(tmp_path / "x")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=rf"x' was not deleted: it {message}"):
        checkpointing.delete(tmp_path / "x")
    assert names(tmp_path) == before


def test_a_checkpoint_with_something_of_the_users_in_it_is_not_deleted(tmp_path):
    path = save(tmp_path, 1)
    (path / "plots.json").mkdir()
    with pytest.raises(CheckpointError, match=r"contains 'plots\.json', which is not part"):
        checkpointing.delete(path)
    (path / "plots.json").rmdir()
    checkpointing.delete(path)
    assert names(tmp_path) == []


def test_a_path_that_leads_elsewhere_is_not_deleted(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has `\.\.` in its path"):
        checkpointing.delete(path / ".." / path.name)
    assert names(tmp_path) == ["checkpoint_1"]


def test_a_disk_that_refuses_to_delete_is_one_clear_error(tmp_path, monkeypatch):
    path = save(tmp_path, 1)

    def refuse(old, new):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk, "rename", refuse)
    with pytest.raises(CheckpointError, match="could not be deleted: Read-only file system"):
        checkpointing.delete(path)
    assert checkpointing.verify(path) == []


# ---- clean


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_what_ended_processes_have_left_is_removed(tmp_path):
    save(tmp_path, 1)
    pid = ended_process()
    (tmp_path / f".tmp-checkpoint_2-{pid}-0123abcd").mkdir()
    (tmp_path / f".tmp-checkpoint_2-{pid}-0123abcd/state.json").write_text("{")
    (tmp_path / f".trash-checkpoint_0-{pid}-00000000").mkdir()
    (tmp_path / f".tmp-checkpoint_3-{os.getpid()}-00000000").mkdir()
    (tmp_path / ".tmp-checkpoint_4-89abcdef").mkdir()  # as format 1 called it
    (tmp_path / f".tmp-latest-{pid}-00000001").symlink_to("checkpoint_1")
    assert len(checkpointing.clean(tmp_path)) == 5
    assert names(tmp_path) == ["checkpoint_1"]


def test_what_may_be_somebody_elses_is_left_alone(tmp_path):
    (tmp_path / ".tmp-notes").mkdir()
    (tmp_path / f".tmp-checkpoint_2-{os.getppid()}-0123abcd").mkdir()
    (tmp_path / "tmp-checkpoint_2-1-0123abcd").mkdir()
    before = names(tmp_path)
    assert checkpointing.clean(tmp_path) == []
    assert names(tmp_path) == before


def test_a_leftover_that_is_a_link_is_removed_and_not_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / ".trash-c-01234567").symlink_to("kept")
    checkpointing.clean(tmp_path)
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


def test_what_cannot_be_removed_is_told_and_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / ".tmp-c-01234567").mkdir()

    def refuse(path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk, "remove_tree", refuse)
    assert checkpointing.clean(tmp_path) == []
    assert "failed to remove " in caplog.text


def test_a_folder_that_is_not_there_is_clean(tmp_path):
    assert checkpointing.clean(tmp_path / "none") == []


# ---- latest


def test_latest_points_at_the_newest_by_a_relative_link(tmp_path):
    save(tmp_path, 1, 2)
    checkpointing.point_latest(tmp_path, "checkpoint_1")
    checkpointing.point_latest(tmp_path, "checkpoint_2")
    assert (tmp_path / "latest").readlink().name == "checkpoint_2"
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2", "latest"]
    assert checkpointing.newest(tmp_path, re.compile(".*")).name == "checkpoint_2"


def test_a_file_called_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").write_text("mine")
    checkpointing.point_latest(tmp_path, "checkpoint_1")
    assert (tmp_path / "latest").read_text() == "mine"
    assert names(tmp_path) == ["latest"]


def test_a_disk_without_links_does_without(tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(disk, "link", refuse)
    checkpointing.point_latest(tmp_path, "checkpoint_1")
    assert names(tmp_path) == []


# ---- probe and space


def test_a_folder_is_made_and_tried_and_left_empty(tmp_path):
    checkpointing.probe(tmp_path / "a/b")
    assert names(tmp_path / "a/b") == []


@pytest.mark.parametrize("act", ["make_folder", "open_new", "write", "sync", "rename"])
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch, act):
    def refuse(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk, act, refuse)
    with pytest.raises(CheckpointError, match=r"is not writable: Read-only"):
        checkpointing.probe(tmp_path)
    assert names(tmp_path) == []


def test_the_space_of_a_state_is_that_of_its_files(tmp_path):
    weight = torch.rand(300, 200)
    state = {
        "model": {"a": weight, "b": weight, "c": weight[1:], "empty": torch.empty(0)},
        "x": [np.ones(1000), {"text": "y" * 500, 3: b"z" * 100, "n": np.float32(1)}, (1.5,)],
    }
    checkpointing.save(tmp_path / "c", state, step=1)
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert size <= checkpointing.state_bytes(state) + 2000
    assert checkpointing.state_bytes(state) <= 1.02 * size


def test_the_free_space_is_that_of_the_disk(tmp_path, monkeypatch):
    free = checkpointing.free_bytes(tmp_path / "not" / "there")
    assert 0 < free <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize

    def refuse(path):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(checkpointing.folder.shutil, "disk_usage", refuse)
    assert checkpointing.free_bytes(tmp_path) is None
