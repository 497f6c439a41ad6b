"""Reading a file by several threads at once."""

from __future__ import annotations

import errno

import pytest
import torch
import xxhash

from modelzoo_trainer import CheckpointError, checkpointing
from modelzoo_trainer.checkpointing import disk, load_save
from modelzoo_trainer.checkpointing.checked_file import CHUNK, parallel_read


@pytest.fixture
def opened(tmp_path):
    content = bytes(range(251)) * 100_000  # six chunks
    (tmp_path / "x").write_bytes(content)
    fd = disk.open_old(tmp_path / "x")
    yield fd, content
    disk.close(fd)


def room(*sizes):
    return [memoryview(bytearray(size)) for size in sizes]


def test_views_of_any_size_are_filled_and_seen_in_order(opened):
    fd, content = opened
    views = room(1, 0, CHUNK, 5, *[7] * 1000, 2 * CHUNK + 3, 0, 100)
    seen = xxhash.xxh3_128()
    parallel_read(fd, views, seen.update)
    total = sum(map(len, views))
    assert b"".join(views) == content[:total]
    assert seen.digest() == xxhash.xxh3_128(content[:total]).digest()


def test_the_next_read_goes_on_where_the_last_one_ended(opened):
    fd, content = opened
    first, second = room(10), room(CHUNK, 20)
    parallel_read(fd, first, len)
    parallel_read(fd, second, len)
    assert b"".join(first + second) == content[: 30 + CHUNK]
    rest = memoryview(bytearray(5))
    disk.read_into(fd, rest)
    assert bytes(rest) == content[30 + CHUNK : 35 + CHUNK]


def test_nothing_to_fill_reads_nothing(opened):
    fd, _ = opened
    parallel_read(fd, [], len)
    parallel_read(fd, room(0, 0), len)


def test_a_file_that_ends_too_early_is_an_error(opened):
    fd, content = opened
    with pytest.raises(ValueError, match="shorter than expected"):
        parallel_read(fd, room(len(content) + 1), len)


def test_a_disk_that_cannot_read_a_block_is_one_clear_error(tmp_path, monkeypatch):
    path = tmp_path / "c"
    checkpointing.save(path, {"model": {"w": torch.rand(6_000_000)}}, step=1)
    real = disk.read_at

    def refuse(fd, views, position):
        if position > 3 * CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, position)

    monkeypatch.setattr(disk, "read_at", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors' cannot be read: Input/output"):
        checkpointing.load(path)
    assert "Input/output error" in checkpointing.verify(path)[0]


@pytest.mark.parametrize("change", ["other", "shorter", "longer"])
def test_a_file_that_changes_after_the_first_look_is_found(tmp_path, monkeypatch, change):
    path = tmp_path / "c"
    checkpointing.save(path, {"model": {"w": torch.ones(100)}}, step=1)
    file = path / "model.safetensors"
    content = file.read_bytes()
    real = load_save.check_listing

    def check_then_change(*args):
        real(*args)
        contents = {
            "other": content[:-1] + b"\x01",
            "shorter": content[:-1],
            "longer": content + b"\0",
        }
        file.write_bytes(contents[change])

    monkeypatch.setattr(load_save, "check_listing", check_then_change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors' cannot be read"):
        checkpointing.load(path)
