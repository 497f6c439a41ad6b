"""Errors of a shared memory that is full name it, and its size."""

from __future__ import annotations

import errno

import pytest
import torch

from modelzoo_trainer.loading import shared_memory
from modelzoo_trainer.loading.shared_memory import note_shared_memory
from modelzoo_trainer.loading.workers import start_iterator

FULL = OSError(errno.ENOSPC, "No space left on device")
ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0: unable to write to file "
                 "</torch_1>: No space left on device (28)"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
                 "dataloader's workers are out of shared memory."),
]  # fmt: skip


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    found = [16384, 16384, 0]
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: tuple(found))
    return found


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("error", ERRORS, ids=["full", "worker", "bus"])
def test_the_folder_its_size_and_the_way_out_are_named_once(sizes, error) -> None:
    note_shared_memory(error)
    note_shared_memory(error)
    [note] = notes_of(error)
    assert "/dev/shm has 0 B of 16 KiB free" in note
    assert "--shm-size" in note
    assert "num_workers" in note


@pytest.mark.parametrize(
    ("error", "free"),
    [(OSError(errno.ENOENT, "no file"), 0), (ValueError("a sample"), 0), (FULL, 1 << 33)],
)
def test_other_errors_stay_as_they_are(sizes, error, free) -> None:
    sizes[:] = [1 << 33, 0, free]
    note_shared_memory(error)
    assert notes_of(error) == []


def test_no_folder_no_note(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "none")
    error = OSError(errno.ENOSPC, "No space left on device")
    note_shared_memory(error)
    assert notes_of(error) == []


class Full:
    """A loader that finds no room, at first or later."""

    def __init__(self, at: str) -> None:
        self.at = at

    def __iter__(self):
        self.raise_at("iter")
        return self

    def __next__(self):
        self.raise_at("next")

    def raise_at(self, at: str) -> None:
        if self.at == at:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["iter", "next"])
def test_an_error_of_a_loader_has_the_note(sizes, at) -> None:
    with pytest.raises(OSError, match="No space") as caught:
        next(start_iterator(Full(at)))
    assert len(notes_of(caught.value)) == 1


def test_an_error_of_sharing_a_tensor_has_the_note(sizes, monkeypatch) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    with pytest.raises(RuntimeError) as caught:
        shared_memory.shared(torch.zeros(1))
    assert len(notes_of(caught.value)) == 1
