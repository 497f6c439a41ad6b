"""Predictions on the way to files: how many, under which names, and a disk that refuses."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.core.parts.prediction_store import (
    PredictionStore,
    RowsPlace,
    prepare_folder,
    remove_earlier,
    write_index,
)
from modelzoo_trainer.core.parts.predictions import INDEX
from modelzoo_trainer.errors import ConfigError, PredictionError

BATCH = {"a": torch.ones(4, 2)}  # 32 bytes


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def filled(folder, limit, num, rank=None):
    store = PredictionStore(folder, limit, rank)
    for number in range(num):
        store.add((number, 0), BATCH)
    return store


@pytest.mark.parametrize(
    ("limit", "num_files", "num_held"),
    [(32 * 5, 0, 5), (32 * 4, 1, 1), (32 * 2, 2, 1), (32, 5, 0), (1, 5, 0), (0, 0, 5)],
)
def test_files_are_written_once_memory_is_full(tmp_path, limit, num_files, num_held) -> None:
    store = filled(tmp_path, limit, 5)
    assert (store.num_files, len(store.held)) == (num_files, num_held)
    store.write_rest()
    assert not store.held
    assert [number for number, _ in store.written] == [(number, 0) for number in range(5)]


def test_what_is_complete_gets_names_and_the_rest_is_removed(tmp_path) -> None:
    first, second = filled(tmp_path, 1, 2), filled(tmp_path, 1, 1, rank=3)
    assert all(name.endswith(".partial") for name in names(tmp_path))
    first.commit_files()
    second.commit_files()
    third = filled(tmp_path, 1, 4)
    third.discard()
    assert names(tmp_path) == [
        "predictions_00000.safetensors",
        "predictions_00000_rank_3.safetensors",
        "predictions_00001.safetensors",
    ]


def test_the_order_of_the_names_does_not_matter(tmp_path) -> None:
    store = PredictionStore(tmp_path, 0, None)
    store.add((0, 0), {"a": torch.zeros(1), "b": torch.ones(1)})
    store.add((1, 0), {"b": torch.ones(1), "a": torch.zeros(1)})
    store.write_rest()
    assert store.written[1].places == {"a": RowsPlace(0, "a", 1, 2), "b": RowsPlace(0, "b", 1, 2)}


@pytest.mark.parametrize("second", [{"a": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)}])
def test_other_names_are_refused(tmp_path, second) -> None:
    store = PredictionStore(tmp_path, 100, None)
    store.add((0, 0), {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ConfigError, match="batch 1 has a"):
        store.add((1, 0), second)


def test_what_no_file_holds_is_refused(tmp_path) -> None:
    store = PredictionStore(tmp_path, 0, None)
    store.add((0, 0), {"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(PredictionError, match=r"'a'.*complex64"):
        store.write_rest()


@pytest.mark.parametrize("act", ["open_new", "write", "sync", "make_folder"])
def test_a_disk_that_refuses_is_named_with_the_file(tmp_path, monkeypatch, act) -> None:
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = PredictionStore(tmp_path / "out", 1, None)
    monkeypatch.setattr(disk, act, refuse)
    with pytest.raises(PredictionError, match=r"out/.*No space left on device.*output_dir"):
        store.add((0, 0), BATCH)
    monkeypatch.undo()
    store.discard()
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("act", ["open_new", "write", "sync", "rename"])
def test_an_index_that_cannot_be_written_is_not_there(tmp_path, monkeypatch, act) -> None:
    def refuse(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, act, refuse)
    with pytest.raises(PredictionError, match=INDEX):
        write_index(tmp_path, [], {}, is_complete=True)
    assert not (tmp_path / INDEX).exists()


def test_places_that_follow_one_another_are_one(tmp_path) -> None:
    places = [
        RowsPlace(0, "a", 0, 2),
        RowsPlace(0, "a", 2, 3),
        RowsPlace(1, "a", 3, 4),
        RowsPlace(1, "b", 4, 5),
    ]
    write_index(tmp_path, ["x", "y"], {"a": places}, is_complete=True)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["outputs"]["a"] == [[0, "a", 0, 3], [1, "a", 3, 4], [1, "b", 4, 5]]


def test_a_folder_is_made_if_it_was_named(tmp_path) -> None:
    assert prepare_folder(tmp_path / "a" / "b", makes=True) is None
    assert (tmp_path / "a" / "b").is_dir()
    assert prepare_folder(tmp_path / "c", makes=False) is None
    assert not (tmp_path / "c").exists()


def test_what_a_killed_run_has_left_is_removed(tmp_path) -> None:
    filled(tmp_path, 1, 2)
    assert prepare_folder(tmp_path, makes=False) is None
    assert names(tmp_path) == []


@pytest.mark.parametrize("makes", [True, False])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, makes) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert str(path) in (prepare_folder(path, makes=makes) or "")
    assert path.read_text() == "mine"


def test_files_that_no_index_names_are_not_overwritten(tmp_path) -> None:
    filled(tmp_path, 1, 1).commit_files()
    assert "predictions_00000.safetensors" in (prepare_folder(tmp_path, makes=True) or "")


def test_no_file_but_those_of_the_index_is_removed(tmp_path) -> None:
    store = filled(tmp_path, 1, 2)
    store.commit_files()
    kept = ["notes.txt", "predictions_final.safetensors", "predictions_1.safetensors"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    listed = [store.name_of(0), store.name_of(1), "notes.txt"]
    write_index(tmp_path, listed, {}, is_complete=True)
    assert prepare_folder(tmp_path, makes=True) is None
    remove_earlier(tmp_path)
    assert names(tmp_path) == sorted(kept)
