"""The acts on the disk, one by one."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

import pytest

from modelzoo_trainer.checkpointing import disk


@pytest.fixture
def opened(tmp_path):
    fd = disk.open_new(tmp_path / "x")
    yield fd
    disk.close(fd)


def test_a_new_file_is_never_one_that_is_there(tmp_path):
    (tmp_path / "x").write_text("kept")
    with pytest.raises(FileExistsError):
        disk.open_new(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "kept"


@pytest.mark.parametrize("target", ["missing", "there"])
def test_no_link_is_followed(tmp_path, target):
    (tmp_path / "there").write_text("kept")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FileExistsError):
        disk.open_new(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        disk.open_old(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_files_are_not_handed_to_programs_that_are_started(tmp_path, opened):
    assert not os.get_inheritable(opened)


def test_the_mode_is_that_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        disk.close(disk.open_new(tmp_path / "x"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_short_and_interrupted_writes_go_on(tmp_path, monkeypatch, opened):
    real = os.write
    calls = []

    def write(fd, view):
        calls.append(len(view))
        if len(calls) % 3 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted")
        return real(fd, view[:5])

    monkeypatch.setattr(os, "write", write)
    assert disk.write(opened, b"0123456789abcdef") == 16
    assert (tmp_path / "x").read_bytes() == b"0123456789abcdef"
    assert len(calls) == 5


def test_a_write_that_writes_nothing_is_an_error(monkeypatch, opened):
    monkeypatch.setattr(os, "write", lambda fd, view: 0)
    with pytest.raises(OSError, match="Input/output"):
        disk.write(opened, b"x")


def test_reading_goes_on_after_short_reads_and_ends_with_the_file(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, position: real(fd, [views[0][:7]], position)
    )
    fd = disk.open_old(tmp_path / "x")
    views = [memoryview(bytearray(size)) for size in (10, 0, 1, 30, 7)]
    empty = memoryview(bytearray(20))
    assert disk.read_at(fd, list(views), 40) == 48
    assert disk.read_at(fd, [empty], 95) == 5
    disk.close(fd)
    assert b"".join(views) == bytes(range(40, 88))
    assert bytes(empty) == bytes(range(95, 100)) + bytes(15)


def test_reading_into_a_view_tells_how_much_there_was(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    fd = disk.open_old(tmp_path / "x")
    view = memoryview(bytearray(8))
    assert disk.read_into(fd, view) == 5
    assert disk.read_into(fd, view) == 0
    disk.close(fd)
    assert bytes(view) == b"12345\0\0\0"


def test_hints_are_never_errors(monkeypatch, opened):
    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    disk.start_writing_back(opened, 0, 10)
    monkeypatch.delattr(os, "posix_fadvise")
    disk.start_writing_back(opened, 0, 10)


def test_a_folder_that_cannot_be_synchronised_is_closed(tmp_path, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_folder(tmp_path)
    assert str(tmp_path) not in opened_paths()


def opened_paths():
    """Return the paths that are open; what others have opened comes and goes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_a_tree_is_removed_and_what_its_links_lead_to_is_not(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to(tmp_path / "kept")
    disk.remove_tree(tmp_path / "tree")
    assert (tmp_path / "kept/file").read_text() == "x"
    assert not (tmp_path / "tree").exists()
