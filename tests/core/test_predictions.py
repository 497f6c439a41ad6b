"""Predictions as a mapping, and those in a folder that is not what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer import PredictionError, Predictions
from modelzoo_trainer.core.parts.prediction_store import PredictionStore, write_index
from modelzoo_trainer.core.parts.predictions import INDEX, OutputPart

ROWS = torch.arange(12.0).reshape(6, 2)


def written(folder: Path, *batches: dict[str, Tensor], is_complete: bool = True) -> Path:
    """Write the outputs of batches to one file, with its index; return the file."""
    store = PredictionStore(folder, 0, None)
    for number, batch in enumerate(batches):
        store.add((number, 0), batch)
    store.write_rest()
    store.commit_files()
    outputs: dict[str, Any] = {name: [] for name in batches[0]}
    for _, places in store.written:
        for name, place in places.items():
            outputs[name].append(place)
    write_index(folder, [store.name_of(0)], outputs, is_complete=is_complete)
    return folder / store.name_of(0)


def test_it_is_a_mapping_of_names_to_tensors() -> None:
    found = Predictions({"a": [OutputPart.of(ROWS)], "b": [OutputPart.of(ROWS[:, 0])]})
    assert list(found) == ["a", "b"]
    assert len(found) == 2
    assert found.num_samples == 6
    assert "c" not in found
    with pytest.raises(KeyError, match=r"no output 'c'; .*: a, b"):
        found["c"]
    assert repr(found) == "Predictions(a: float32 (6, 2), b: float32 (6,))"


def test_of_nothing_it_is_empty() -> None:
    found = Predictions({}, is_complete=False)
    assert (dict(found), found.num_samples) == ({}, 0)
    assert repr(found).endswith("; incomplete)")


def test_parts_of_one_shape_are_joined_and_others_are_rows() -> None:
    parts = [OutputPart.of(ROWS[:4]), OutputPart.of(ROWS[4:])]
    other = [OutputPart.of(ROWS[:4]), OutputPart.of(ROWS[4:, :1])]
    double = [OutputPart.of(ROWS[:4]), OutputPart.of(ROWS[4:].double())]
    found = Predictions({"a": parts, "b": other, "c": double})
    assert torch.equal(found["a"], ROWS)
    assert [len(found[name]) for name in "bc"] == [6, 6]
    assert [row.shape[0] for row in found["b"]] == [2, 2, 2, 2, 1, 1]
    assert "b: 6 tensors" in repr(found)
    assert [len(part) for part in found.parts("b")] == [4, 2]


def test_a_folder_gives_back_what_was_written(tmp_path) -> None:
    ragged = torch.tensor([[7], [8]])
    written(
        tmp_path,
        {"a": ROWS[:4], "b": ROWS[:4], "none": ROWS[:4, :0]},
        {"a": ROWS[4:], "b": ragged, "none": ROWS[4:, :0]},
        is_complete=False,
    )
    found = Predictions.load(tmp_path)
    assert torch.equal(found["a"], ROWS)
    assert [row.tolist() for row in found["b"]] == [*ROWS[:4].tolist(), [7], [8]]
    assert found["none"].shape == (6, 0)
    assert (found.is_complete, found.path) == (False, tmp_path)


def test_a_folder_may_be_moved(tmp_path) -> None:
    written(tmp_path / "here", {"a": ROWS})
    (tmp_path / "here").rename(tmp_path / "there")
    assert torch.equal(Predictions.load(tmp_path / "there")["a"], ROWS)


def test_a_name_is_not_taken_for_a_part_of_another(tmp_path) -> None:
    one = {"a": ROWS[:1], "a/0": ROWS[:1] + 10, "a/1": ROWS[:1] + 20}
    two = {"a": ROWS[:1, :1], "a/0": ROWS[:1, :1] + 10, "a/1": ROWS[:1, :1] + 20}
    written(tmp_path, one, two)
    found = Predictions.load(tmp_path)
    for name in one:
        assert [row.tolist() for row in found[name]] == [
            one[name][0].tolist(),
            two[name][0].tolist(),
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format="other"), "'other'"),
        (lambda index: index.update(version=2), "version 2"),
        (lambda index: index.pop("files"), "valid index"),
        (lambda index: index.update(files=["../predictions_00000.safetensors"]), "valid index"),
        (lambda index: index.update(files=["/etc/passwd"]), "valid index"),
        (lambda index: index.update(files=[]), "does not match"),
        (lambda index: index.update(outputs=[]), "valid index"),
        (lambda index: index["outputs"]["a"].append([1, "a", 0, 1]), "does not match"),
        (lambda index: index["outputs"]["a"].append([-1, "a", 0, 1]), "does not match"),
        (lambda index: index["outputs"]["a"].append([0, "z", 0, 1]), "does not match"),
        (lambda index: index["outputs"]["a"].append([0, "a", 0, 7]), "does not match"),
        (lambda index: index["outputs"]["a"].append([0, "a", 3, 2]), "does not match"),
        (lambda index: index["outputs"]["a"].append([0, "a", "0", 1]), "does not match"),
        (lambda index: index["outputs"]["a"].append([0]), "does not match"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, message) -> None:
    written(tmp_path, {"a": ROWS})
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(PredictionError, match=message):
        Predictions.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "null"])
def test_an_index_that_is_none_is_refused(tmp_path, text) -> None:
    written(tmp_path, {"a": ROWS})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(PredictionError, match="valid index"):
        Predictions.load(tmp_path)


def test_a_folder_without_predictions_is_refused(tmp_path) -> None:
    with pytest.raises(PredictionError, match="has no predictions"):
        Predictions.load(tmp_path / "nowhere")


def test_a_file_that_is_missing_or_cut_off_is_refused(tmp_path) -> None:
    path = written(tmp_path, {"a": ROWS})
    content = path.read_bytes()
    opened = Predictions.load(tmp_path)
    path.write_bytes(content[:-1])
    with pytest.raises(PredictionError, match=r"predictions_00000\.safetensors"):
        Predictions.load(tmp_path)
    with pytest.raises(PredictionError, match="replaced"):
        opened["a"]
    path.unlink()
    with pytest.raises(PredictionError, match=r"predictions_00000\.safetensors"):
        opened["a"]
