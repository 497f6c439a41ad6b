"""Predictions of several processes: each sample once, in the order that one process has."""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from modelzoo_trainer import Callback, Predictions, Trainer
from modelzoo_trainer.callbacks import ScopedValidateFlags
from modelzoo_trainer.checkpointing import disk
from tests.distributed.data_runs import Part
from tests.distributed.ranks import run_ranks, try_ranks


class Echo(nn.Module):
    """Returns what it is given, and its length, of which there is one for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inner = nn.Linear(1, 2)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        rows = batch[0] if isinstance(batch, (tuple, list)) else batch
        rows = rows.reshape(len(rows), -1)
        return {
            "rows": rows * self.weight,
            "inner": self.inner(rows),
            "wide": rows.expand(-1, 1 + int(rows.max()) % 2),
            "loss": rows.mean(),
        }


def numbers(num: int) -> Tensor:
    return torch.arange(float(num))


class Stop(Callback):
    def on_predict_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.backend.is_main:
            trainer.early_exit.stop("enough")


def predict(rank: int, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    case = dict(case)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("modelzoo_trainer").addHandler(handler)
    callbacks: list[Any] = [Stop()] if case.pop("stops", False) else []
    if (size := case.pop("micro_batch_size", None)) is not None:
        callbacks.append(ScopedValidateFlags(**{"csx.performance.micro_batch_size": size}))
    num, batch_size = case.pop("num", 11), case.pop("size", 2)
    kind = case.pop("kind", "loader")
    data = TensorDataset(numbers(num))
    loader: Any = DataLoader(data, batch_size)
    if kind == "list":
        loader = list(numbers(num).split(batch_size))
    elif kind == "own":
        loader = Part(*(numbers(num)[rank * 4 : rank * 4 + 4 - rank]))
    elif kind == "sampler":
        loader = DataLoader(data, batch_size, sampler=DistributedSampler(data, 2, rank))
    trainer = Trainer(
        device="cpu",
        backend=case.pop("backend", None),
        model_dir=folder,
        model=Echo,
        callbacks=callbacks,
        seed=1,
    )
    found = trainer.predict(loader, **case)
    wide = found.get("wide", [])
    return {
        "rows": found["rows"].flatten().tolist(),
        "inner": found["inner"].tolist(),
        "wide": [row.tolist() for row in wide],
        "path": None if found.path is None else str(found.path),
        "is_complete": found.is_complete,
        "told": told,
    }


def predict_each(rank: int, folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [predict(rank, folder / str(number), case) for number, case in enumerate(cases)]


MODES = {"memory": {}, "files": {"max_in_memory": 60}, "one in files": {"max_in_memory": 200}}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 3])
def test_all_processes_have_all_rows_in_order(tmp_path, count, mode) -> None:
    cases = [{"num": 11}, {"num": 1}, {"num": 12, "micro_batch_size": 1}]
    found_of_all = run_ranks(count, predict_each, tmp_path, [case | MODES[mode] for case in cases])
    for number, (case, *results) in enumerate(zip(cases, *found_of_all, strict=True)):
        folder = tmp_path / str(number)
        rows = numbers(case["num"]).tolist()
        for found in results:
            assert found["rows"] == rows
            assert [row[0] for row in found["wide"]] == rows
            assert found["is_complete"]
        if mode == "memory" or case["num"] == 1:
            assert {found["path"] for found in results} == {None}
        else:
            assert {found["path"] for found in results} == {str(folder / "predictions")}
            loaded = Predictions.load(folder / "predictions")
            assert loaded["rows"].flatten().tolist() == rows
            assert len(list((folder / "predictions").glob("*_rank_*"))) >= count


@pytest.mark.slow
def test_output_dir_has_the_files_of_all(tmp_path) -> None:
    run_ranks(2, predict, tmp_path / "run", {"output_dir": tmp_path / "out"})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "predictions.json",
        "predictions_00000_rank_0.safetensors",
        "predictions_00000_rank_1.safetensors",
    ]
    assert Predictions.load(tmp_path / "out")["rows"].flatten().tolist() == numbers(11).tolist()


@pytest.mark.slow
def test_lists_are_divided_as_well(tmp_path) -> None:
    for found in run_ranks(2, predict, tmp_path, {"kind": "list", "num": 9, "size": 3}):
        assert found["rows"] == numbers(9).tolist()


@pytest.mark.slow
def test_loaders_of_their_own_are_warned_of_and_padding_is_dropped(tmp_path) -> None:
    results = run_ranks(2, predict, tmp_path, {"kind": "own"})
    assert [found["rows"] for found in results] == [[0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0]] * 2
    assert any("ordered by batch" in line for line in results[0]["told"])


@pytest.mark.slow
def test_a_sampler_that_divides_is_refused_by_all(tmp_path) -> None:
    results = try_ranks(2, predict, tmp_path, {"kind": "sampler"}, stay=False)
    assert [ok for ok, _ in results] == [False, False]
    assert all("has a sampler that shards the data" in said for _, said in results)


@pytest.mark.slow
def test_a_stop_of_one_process_ends_all_at_the_same_batch(tmp_path) -> None:
    results = run_ranks(2, predict, tmp_path, {"num": 400, "size": 1, "stops": True})
    assert [found["is_complete"] for found in results] == [False, False]
    assert results[0]["rows"] == results[1]["rows"]
    num = len(results[0]["rows"])
    assert 4 <= num < 400
    assert results[0]["rows"] == numbers(num).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "files"])
def test_processes_that_share_their_data_give_it_once(tmp_path, mode) -> None:
    split = {"parallel": {"tensor": 2}, "tensor_plan": {"inner": "colwise_gather"}}
    [alone] = run_ranks(1, predict, tmp_path / "alone", {})
    for found in run_ranks(2, predict, tmp_path, {"backend": split} | MODES[mode]):
        assert found["rows"] == numbers(11).tolist()
        # A kernel may round the product of fewer columns in another way: 1 unit of the last place.
        torch.testing.assert_close(
            torch.tensor(found["inner"]), torch.tensor(alone["inner"]), rtol=2**-23, atol=0.0
        )


def refused(rank: int, folder: Path) -> None:
    (folder / "out").mkdir(exist_ok=True, parents=True)
    (folder / "out" / "predictions_00000_rank_0.safetensors").write_text("mine")
    predict(rank, folder / "run", {"output_dir": folder / "out"})


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_refused_by_all(tmp_path) -> None:
    results = try_ranks(2, refused, tmp_path, stay=False)
    assert [ok for ok, _ in results] == [False, False]
    assert all("ConfigError: output_dir" in said for _, said in results)


def refused_by_the_disk(rank: int, folder: Path, *, late: bool) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        disk.rename = refuse if late else disk.rename
        disk.write = disk.write if late else refuse
    predict(rank, folder, {"output_dir": folder / "out"})


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("late", [False, True])
def test_a_disk_that_refuses_one_process_ends_all(tmp_path, late) -> None:
    results = try_ranks(2, partial(refused_by_the_disk, late=late), tmp_path, stay=False)
    assert [ok for ok, _ in results] == [False, False]
    assert "No space left on device" in results[1][1]
    assert not (tmp_path / "out" / "predictions.json").exists()
