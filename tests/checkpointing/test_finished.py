from __future__ import annotations

import os
import shutil

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.errors import CheckpointError

NOTE = ".finished.json"


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints."""
    for step in (1, 2):
        state = {"weight": torch.full((3,), float(step))}
        checkpointing.save(tmp_path / f"checkpoint_{step}", state, step=step)
    return [tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"]


def test_a_checkpoint_is_finished_when_that_was_noted(saved) -> None:
    first, second = saved
    assert not checkpointing.is_finished(first)
    checkpointing.note_finished(first)
    assert checkpointing.is_finished(first)
    assert not checkpointing.is_finished(second)
    checkpointing.note_finished(second)
    assert checkpointing.is_finished(first)
    assert checkpointing.verify(first) == checkpointing.verify(second) == []
    assert len(checkpointing.list_checkpoints(first.parent)) == 2


def test_a_note_is_not_written_twice(saved) -> None:
    checkpointing.note_finished(saved[0])
    before = (saved[0].parent / NOTE).stat().st_mtime_ns
    checkpointing.note_finished(saved[0])
    assert (saved[0].parent / NOTE).stat().st_mtime_ns == before


def test_another_checkpoint_of_the_same_name_is_not_finished(saved) -> None:
    checkpointing.note_finished(saved[0])
    shutil.rmtree(saved[0])
    checkpointing.save(saved[0], {"weight": torch.zeros(4)}, step=1)
    assert not checkpointing.is_finished(saved[0])


def test_what_is_deleted_is_forgotten_even_if_it_comes_back(saved) -> None:
    checkpointing.note_finished(saved[0])
    checkpointing.note_finished(saved[1])
    saved[0].rename(saved[0].with_name("elsewhere"))
    checkpointing.forget_deleted(saved[0].parent)
    saved[0].with_name("elsewhere").rename(saved[0])
    assert [checkpointing.is_finished(path) for path in saved] == [False, True]


def test_a_folder_without_checkpoints_is_left_as_it_is(tmp_path) -> None:
    checkpointing.forget_deleted(tmp_path / "not there")
    checkpointing.forget_deleted(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[", "[1]", '"checkpoint_1"', "null", "[" * 100_000])
def test_a_damaged_note_says_nothing_and_is_replaced(saved, content) -> None:
    (saved[0].parent / NOTE).write_text(content, encoding="ascii")
    assert not checkpointing.is_finished(saved[0])
    checkpointing.note_finished(saved[0])
    assert checkpointing.is_finished(saved[0])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_in_the_place_of_the_note_is_not_waited_for(saved) -> None:
    os.mkfifo(saved[0].parent / NOTE)
    assert not checkpointing.is_finished(saved[0])


def test_a_disk_that_refuses_the_note_is_an_error(saved, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing.finished.disk, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"finished\.json.*No space left"):
        checkpointing.note_finished(saved[0])
    assert not checkpointing.is_finished(saved[0])
