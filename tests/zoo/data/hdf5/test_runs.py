"""Runs of a small model on HDF5 files: bad input, a kill, several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5MapDataProcessor
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.distributed.ranks import run_ranks, try_ranks
from tests.zoo.data.hdf5.written import samples, write

SIZES = {
    "vocab_size": 64,
    "hidden_size": 8,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "filter_size": 16,
    "max_position_embeddings": 16,
}


# ---- bad input on the command line


def run(tmp_path, capsys, mode="fit", model=None, **data):
    """Return the exit code of a run and its messages."""
    place = {"data_processor": "GptHDF5MapDataProcessor", "batch_size": 4, "num_workers": 0, **data}
    trainer = {
        "init": {
            "device": "cpu",
            "model_dir": str(tmp_path / "run"),
            "model": {"name": "gpt2", **SIZES, **(model or {})},
            "optimizer": {"SGD": {"lr": 0.1}},
            "loop": {"num_epochs": 2},
        },
        "fit": {"train_dataloader": place},
    }
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    code = main([mode, str(file)])
    out, said = capsys.readouterr()
    return code, out + said


def data_of(tmp_path, kind):
    path = tmp_path / "data"
    rows = samples(40) % 60
    rows[:, 1] = 1
    write(path / "a.h5", rows)
    match kind:
        case "dtype":
            write(path / "b.h5", rows.astype(np.int64))
        case "shape":
            write(path / "b.h5", samples(4, length=9))
        case "dataset":
            write(path / "b.h5", rows, dataset="rows")
        case "truncated":
            (path / "b.h5").write_bytes((path / "a.h5").read_bytes()[:2000])
        case "token":
            rows[1, 0, 3] = 64
            write(path / "b.h5", rows)
        case "late token":
            rows[7, 2, 3] = 64
            write(path / "b.h5", np.concatenate([rows] * 5))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "settings", "facts"),
    [
        ("dtype", {}, ["b.h5", "int64", "int32"]),
        ("shape", {}, ["b.h5", "(rows, 3, 9)"]),
        ("dataset", {}, ["b.h5", "'data'", "'rows'"]),
        ("truncated", {}, ["b.h5", "truncated"]),
        ("token", {}, ["b.h5: dataset 'data', row 1", "64", "vocab_size"]),
        ("late token", {}, ["b.h5: dataset 'data', row ", "labels", "64", "vocab_size"]),
        ("", {"model": {"vocab_size": 45}}, ["a.h5: dataset 'data', row ", "vocab_size is 45"]),
        ("", {"model": {"max_position_embeddings": 7}}, ["a.h5", "max_position_embeddings is 7"]),
        ("", {"batch_size": -4}, ["batch_size", "-4"]),
        ("", {"use_vsl": True}, ["a.h5", "use_vsl"]),
    ],
)
@pytest.mark.slow_cases("dtype*", "shape*", "-settings8*", "-settings9*", every=4)
def test_bad_data_ends_a_run_with_one_message(tmp_path, capsys, kind, settings, facts):
    code, said = run(tmp_path, capsys, data_dir=data_of(tmp_path, kind), **settings)

    assert code == 2
    assert [fact for fact in facts if fact not in said] == []
    assert "Traceback" not in said


@pytest.mark.slow
def test_bad_data_in_a_worker_ends_a_run_with_the_same_message(tmp_path, capsys):
    path = data_of(tmp_path, "late token")
    here = run(tmp_path, capsys, data_dir=path)
    there = run(tmp_path, capsys, data_dir=path, num_workers=1)

    assert here[0] == there[0] == 2
    messages = [one for one in here[1].splitlines() if "b.h5" in one]
    assert len(messages) == 1
    assert [one for one in there[1].splitlines() if "b.h5" in one] == messages
    assert "Traceback" not in there[1]


@pytest.mark.parametrize("weight", [0, ".nan", -1])
def test_weights_of_a_mixture_that_are_no_proportions_are_found_by_a_check(
    tmp_path, capsys, weight
):
    weight = yaml.safe_load(str(weight))
    mixture = [{"data_dir": "nowhere", "weight": weight}]
    code, said = run(tmp_path, capsys, mode="check", mixture=mixture)

    assert code == 2
    assert "mixture" in said
    assert "params.yaml:" in said


def test_a_check_says_which_folders_are_missing(tmp_path, capsys):
    code, said = run(tmp_path, capsys, mode="check", data_dir=[data_of(tmp_path, ""), "nowhere"])

    assert code == 2
    assert "data_dir 'nowhere' does not exist" in said


def test_an_empty_folder_ends_a_run(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, said = run(tmp_path, capsys, data_dir=str(tmp_path / "empty"))

    assert code == 2
    assert "empty" in said


# ---- in Python


class Watch(Callback):
    """Keep the tokens and the losses of each step, and end the process after one of them."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.seen.append((batch["input_ids"][:, 0].tolist(), outputs["loss"].item()))

    def on_step_committed(self, trainer):
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    rank: int, path: str, folder: str, killed_at: int | None = None, **data: Any
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    watch = Watch(killed_at)
    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: Gpt2(**SIZES, dropout_rate=0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=11),
        checkpoint=Checkpoint(steps=3),
        callbacks=[watch],
        progress="none",
        seed=0,
    )
    made = GptHDF5MapDataProcessor(
        **{"data_dir": path, "batch_size": 4, "shuffle": True, "shuffle_seed": 5, **data}
    )
    trainer.fit(made.create_dataloader())
    state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.close()
    return watch.seen, state


@pytest.fixture
def files(tmp_path):
    for number, part in enumerate(np.split(samples(18), [5, 11])):
        write(tmp_path / "data" / f"{number}.h5", part)
    return str(tmp_path / "data")


def test_a_change_between_epochs_ends_a_run(files, tmp_path):
    class Change(Callback):
        def on_train_epoch_end(self, trainer, epoch):
            os.utime(Path(files, "1.h5"), (1, 1))

    trainer = Trainer(
        device="cpu",
        model_dir=tmp_path / "run",
        model=Gpt2(**SIZES),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loop=TrainingLoop(num_epochs=2),
        callbacks=[Change()],
        progress="none",
    )
    made = GptHDF5MapDataProcessor(data_dir=files, batch_size=4)

    with pytest.raises(ConfigError, match=r"1\.h5: has been changed"):
        trainer.fit(made.create_dataloader())
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        {"num_workers": 1},
        {"data_transforms": [{"name": "add_sink_tokens"}], "drop_last": False},
    ],
)
def test_a_run_that_is_killed_within_an_epoch_ends_with_the_same_bits(files, tmp_path, data):
    seen, state = trained(0, files, str(tmp_path / "whole"), **data)
    folder = str(tmp_path / "run")
    ((ok, _),) = try_ranks(1, killed, files, folder, data)
    assert not ok

    rest, resumed = trained(0, files, folder, **data)

    assert rest == seen[-len(rest) :]
    assert 2 <= len(rest) <= 8
    assert {key: value.tobytes() for key, value in numbers(resumed)} == {
        key: value.tobytes() for key, value in numbers(state)
    }


def numbers(state):
    return [(key, value.numpy()) for key, value in state.items()]


def killed(rank: int, files: str, folder: str, data: dict[str, Any]) -> None:
    trained(rank, files, folder, killed_at=5, **data)


def divided(rank: int, files: str, folder: str, data: dict[str, Any]) -> list[Any]:
    return trained(rank, files, folder, **data)[0]


# CI: batches that do not divide.
@pytest.mark.soak_cases("data0")
@pytest.mark.slow
@pytest.mark.parametrize("data", [{}, {"drop_last": False, "pad_last": True}])
def test_two_processes_train_on_the_batches_of_one(files, tmp_path, data):
    alone, _ = trained(0, files, str(tmp_path / "one"), **data)

    parts = run_ranks(2, divided, files, str(tmp_path / "two"), data)

    together = [first + second for (first, _), (second, _) in zip(*parts, strict=True)]
    assert together == [tokens for tokens, _ in alone]
