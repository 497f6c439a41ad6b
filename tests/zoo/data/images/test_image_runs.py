"""Runs of a small vision transformer on images: bad input, a kill, several processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.data.images.imagenet import ImageNet1KProcessor
from modelzoo_trainer.zoo.models.vision.classifier import Vit
from tests.distributed.ranks import run_ranks, try_ranks
from tests.zoo.data.images.written import write_images

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "filter_size": 16,
    "image_size": [8, 8],
    "patch_size": [4, 4],
    "num_classes": 3,
}
DATA: dict[str, Any] = {
    "batch_size": 4,
    "image_size": [8, 8],
    "transforms": [
        {"name": "random_resized_crop", "size": 8},
        {"name": "random_horizontal_flip"},
        {"name": "to_tensor"},
    ],
    "shuffle_seed": 5,
}


def run(tmp_path, capsys, model=None, **data):
    """Return the exit code of a run and its messages."""
    place = {"data_processor": "ImageNet1KProcessor", "data_dir": str(tmp_path), **DATA, **data}
    trainer = {
        "init": {
            "device": "cpu",
            "model_dir": str(tmp_path / "run"),
            "model": {"name": "vision_transformer", **SIZES, **(model or {})},
            "optimizer": {"SGD": {"lr": 0.1}},
            "loop": {"num_epochs": 1},
        },
        "fit": {"train_dataloader": place, "val_dataloader": {**place, "split": "val"}},
    }
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    code = main(["fit", str(file)])
    out, said = capsys.readouterr()
    return code, out + said


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"truncated": "c1/0.png", "shuffle": False}, ["train/c1/0.png", "truncated"]),
        ({"model": {"num_classes": 2}}, ["num_classes is 2", "3 folders"]),
        ({"model": {"image_size": [12, 8]}}, ["(4, 3, 8, 8)", "image_size"]),
        ({}, []),
    ],
)
@pytest.mark.slow_cases("change1*", "change2*")
def test_bad_data_ends_a_run_with_one_message(tmp_path, capsys, change, facts):
    for split in ("train", "val"):
        write_images(tmp_path / split, 3, 2)
    change = dict(change)
    truncated = change.pop("truncated", None)
    if truncated is not None:
        path = tmp_path / "train" / truncated
        path.write_bytes(path.read_bytes()[:50])

    code, said = run(tmp_path, capsys, **change)

    messages = said.split("\n")[:-1]
    assert (code == 0, len(messages)) == ((False, 1) if facts else (True, 0))
    assert [fact for fact in facts if fact not in said] == []


class Watch(Callback):
    """Keep the images and the losses of each step, and end the process after one of them."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.seen.append((batch[0].tolist(), outputs["loss"].item()))

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
        model=lambda: Vit(**SIZES),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=11),
        checkpoint=Checkpoint(steps=3),
        callbacks=[watch],
        progress="none",
        seed=0,
    )
    made = ImageNet1KProcessor(**{"data_dir": path, **DATA, **data})
    trainer.fit(made.create_dataloader())
    state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.close()
    return watch.seen, state


def killed(rank: int, files: str, folder: str, data: dict[str, Any]) -> None:
    trained(rank, files, folder, killed_at=5, **data)


def divided(rank: int, files: str, folder: str) -> list[Any]:
    return trained(rank, files, folder)[0]


@pytest.fixture
def files(tmp_path):
    write_images(tmp_path / "data" / "train", 3, 3)
    return str(tmp_path / "data")


# CI: with a worker; without one, and with the last batch: tests/numerics/test_resume_data.py.
@pytest.mark.soak_cases("data1")
@pytest.mark.slow
@pytest.mark.parametrize("data", [{"num_workers": 1}, {"drop_last": False}])
def test_a_run_that_is_killed_within_an_epoch_ends_with_the_same_bits(files, tmp_path, data):
    seen, state = trained(0, files, str(tmp_path / "whole"), **data)
    folder = str(tmp_path / "run")
    ((ok, _),) = try_ranks(1, killed, files, folder, data)
    assert not ok

    rest, resumed = trained(0, files, folder, **data)

    assert rest == seen[-len(rest) :]
    assert 2 <= len(rest) <= 8
    assert all(map(torch.equal, resumed.values(), state.values()))


@pytest.mark.slow
def test_two_processes_train_on_the_batches_of_one_also_after_a_resume(files, tmp_path):
    alone, _ = trained(0, files, str(tmp_path / "one"))
    for folder in ("two", "resumed"):
        if folder == "resumed":
            try_ranks(1, killed, files, str(tmp_path / folder), {})
        parts = run_ranks(2, divided, files, str(tmp_path / folder))
        together = [first + second for (first, _), (second, _) in zip(*parts, strict=True)]
        assert together == [images for images, _ in alone][-len(together) :]
        assert (len(together) < len(alone)) == (folder == "resumed")
