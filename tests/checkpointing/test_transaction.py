"""A checkpoint that is being written, piece by piece."""

from __future__ import annotations

import errno
import os
import re

import pytest
import xxhash

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import CheckpointTransaction, FileRecord, disk
from modelzoo_trainer.checkpointing.file_writing import write_file


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_draft_is_hidden_beside_its_place_until_it_is_committed(tmp_path):
    transaction = CheckpointTransaction(tmp_path / "c")
    assert re.fullmatch(rf"\.tmp-c-{os.getpid()}-[0-9a-f]{{8}}", transaction.folder.name)
    transaction.write("a.json", [b"1"])
    assert checkpointing.list_checkpoints(tmp_path) == []
    transaction.commit(step=3)
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == ["a.json", "manifest.json"]
    assert checkpointing.read_manifest(tmp_path / "c").step == 3


def test_a_record_is_of_what_was_handed_over(tmp_path, monkeypatch):
    real = disk.write

    def write_something_else(fd, view):
        return real(fd, bytes(len(view)))

    monkeypatch.setattr(disk, "write", write_something_else)
    record = write_file(tmp_path / "x", [b"ab", memoryview(b"cdef")[::1], b""])
    expected = xxhash.xxh3_128_hexdigest(b"abcdef")
    assert record == FileRecord(size_bytes=6, xxh3_128=expected)
    assert (tmp_path / "x").read_bytes() == bytes(6)


def test_large_files_begin_their_way_to_the_disk_early(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(disk, "start_writing_back", lambda fd, begin, size: begun.append(begin))
    content = bytes(range(256)) * (1 << 17)
    record = write_file(tmp_path / "x", [content[:100], content[100:]])
    assert record.size_bytes == len(content)
    assert begun == [100 + piece * (1 << 23) for piece in range(3)]
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize(
    "name", ["../x.json", "a/b.json", "x.pkl", "", ".x.json", "manifest.json", "model"]
)
def test_a_name_that_no_reader_would_take_is_refused(tmp_path, name):
    transaction = CheckpointTransaction(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is not a valid name"):
        transaction.write(name, [b"x"])
    assert names(tmp_path) == []


def test_a_name_is_written_once(tmp_path):
    transaction = CheckpointTransaction(tmp_path / "c")
    transaction.write("x.json", [b"1"])
    with pytest.raises(CheckpointError, match=r"'x\.json' is not a valid name"):
        transaction.write("x.json", [b"2"])
    assert names(tmp_path) == []


def test_files_of_other_processes_are_committed_by_their_records(tmp_path):
    transaction = CheckpointTransaction(tmp_path / "c")
    transaction.records["shard-1.safetensors"] = write_file(
        transaction.folder / "shard-1.safetensors", [b"x"]
    )
    transaction.commit(step=1)
    assert checkpointing.verify(tmp_path / "c") == []


@pytest.mark.parametrize("content", [None, b"xy"])
def test_a_file_of_another_process_that_is_not_there_is_missed(tmp_path, content):
    transaction = CheckpointTransaction(tmp_path / "c")
    if content is not None:
        (transaction.folder / "y.json").write_bytes(content)
    transaction.records["y.json"] = FileRecord(size_bytes=1, xxh3_128="0" * 32)
    with pytest.raises(CheckpointError, match=r"'y\.json' .*must write to the same"):
        transaction.commit(step=1)
    assert names(tmp_path) == []


def test_leaving_the_block_without_a_commit_leaves_nothing(tmp_path):
    with CheckpointTransaction(tmp_path / "c") as transaction:
        transaction.write("x.json", [b"1"])
    assert names(tmp_path) == []


def test_leaving_the_block_after_a_commit_changes_nothing(tmp_path):
    with CheckpointTransaction(tmp_path / "c") as transaction:
        transaction.commit(step=0)
    transaction.discard()
    assert checkpointing.verify(tmp_path / "c") == []


def test_a_name_that_may_not_last_is_taken_back(tmp_path, monkeypatch):
    transaction = CheckpointTransaction(tmp_path / "c")
    real = disk.sync_folder

    def refuse(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(disk, "sync_folder", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        transaction.commit(step=1)
    assert names(tmp_path) == []


def test_chunks_that_raise_leave_nothing(tmp_path):
    def chunks():
        yield b"x"
        raise ZeroDivisionError

    transaction = CheckpointTransaction(tmp_path / "c")
    with pytest.raises(ZeroDivisionError):
        transaction.write("x.json", chunks())
    assert names(tmp_path) == []


def test_a_draft_stays_where_it_was_begun(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    transaction = CheckpointTransaction((tmp_path / "c").relative_to(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    transaction.commit(step=1)
    assert names(tmp_path) == ["c", "elsewhere"]


def test_a_name_that_is_too_long_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be saved: the name '.*x.* bytes"):
        CheckpointTransaction(tmp_path / ("x" * 250))
    assert names(tmp_path) == []
