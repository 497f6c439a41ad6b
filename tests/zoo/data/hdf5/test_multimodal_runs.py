"""Runs of small models on text with images: a kill, several processes, messages."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.data.hdf5.multimodal import (
    LlavaHDF5MapDataProcessor,
    MultimodalSimpleHDF5MapDataProcessor,
)
from modelzoo_trainer.zoo.models.multimodal.llava import Llava
from modelzoo_trainer.zoo.models.multimodal.simple import MultimodalSimple
from tests.distributed.ranks import run_ranks, try_ranks
from tests.zoo.data.hdf5.images_written import write
from tests.zoo.models.llava_cases import LLAVA, SIMPLE, TEXT

IMAGE = {"image_size": [8, 8], "patch_size": [8, 4]}
SHORT = TEXT | {"max_position_embeddings": 8}
RANDOM = [{"name": "random_resized_crop", "size": 8}, {"name": "to_tensor"}]


def llava() -> Llava:
    given: dict[str, Any] = dict(LLAVA, text_model=SHORT, image_model=LLAVA["image_model"] | IMAGE)
    return Llava(**given, freeze=["^image_model"])


def simple() -> MultimodalSimple:
    encoder = SIMPLE["image_model_list"]["image_models"][0]["image_encoder"] | IMAGE
    images = SIMPLE["image_model_list"] | {"image_models": [{"image_encoder": encoder}]}
    return MultimodalSimple(image_model_list=images, text_model=SHORT)


PARTS: dict[str, Any] = {
    "llava": (llava, LlavaHDF5MapDataProcessor),
    "simple": (simple, MultimodalSimpleHDF5MapDataProcessor),
}


class Watch(Callback):
    """Keep the rows and the losses of each step, and end the process after one of them."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        rows = [batch[key].tolist() for key in ("text_input_ids", "image_data")]
        self.seen.append((rows, outputs["loss"].item()))

    def on_step_committed(self, trainer):
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    rank: int, case: str, data: dict[str, Any], folder: str, killed_at: int | None = None
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    watch = Watch(killed_at)
    model, processor = PARTS[case]
    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=model,
        optimizer=lambda made: torch.optim.AdamW(made.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=11),
        checkpoint=Checkpoint(steps=3),
        callbacks=[watch],
        progress="none",
        seed=0,
    )
    trainer.fit(processor(**data).create_dataloader())
    state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.close()
    return watch.seen, state


def killed(rank: int, case: str, data: dict[str, Any], folder: str) -> None:
    trained(rank, case, data, folder, killed_at=5)


def divided(rank: int, case: str, data: dict[str, Any], folder: str) -> list[Any]:
    return trained(rank, case, data, folder)[0]


def data_of(tmp_path, case):
    made = write(tmp_path / "data", 9, images=1 if case == "llava" else 2)
    return made | {"shuffle": True, "batch_size": 4, "transforms": RANDOM, "drop_last": True}


# CI: each processor; a worker, and none.
@pytest.mark.soak_cases("llava-more1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "more"),
    [("llava", {"num_workers": 1}), ("llava", {"drop_last": False}), ("simple", {})],
)
def test_a_run_that_is_killed_within_an_epoch_ends_with_the_same_bits(tmp_path, case, more):
    data = data_of(tmp_path, case) | more
    seen, state = trained(0, case, data, str(tmp_path / "whole"))
    folder = str(tmp_path / "run")
    ((ok, _),) = try_ranks(1, killed, case, data, folder)
    assert not ok

    rest, resumed = trained(0, case, data, folder)

    assert rest == seen[-len(rest) :]
    assert 2 <= len(rest) <= 8
    assert all(map(torch.equal, resumed.values(), state.values()))


@pytest.mark.slow
@pytest.mark.parametrize("case", PARTS)
def test_two_processes_train_on_the_batches_of_one_also_after_a_resume(tmp_path, case):
    data = data_of(tmp_path, case)
    alone, _ = trained(0, case, data, str(tmp_path / "one"))
    for folder in ("two", "resumed"):
        if folder == "resumed":
            try_ranks(1, killed, case, data, str(tmp_path / folder))
        parts = run_ranks(2, divided, case, data, str(tmp_path / folder))
        together = [
            [one + other for one, other in zip(first, second, strict=True)]
            for (first, _), (second, _) in zip(*parts, strict=True)
        ]
        assert together == [rows for rows, _ in alone][-len(together) :]
        assert (len(together) < len(alone)) == (folder == "resumed")


def fit(tmp_path, capsys, data, **model):
    """Return the exit code of a run and its messages."""
    image = LLAVA["image_model"] | IMAGE
    settings = {"name": "llava", **LLAVA, "image_model": image, "text_model": SHORT, **model}
    place = {"data_processor": "LlavaHDF5MapDataProcessor", **data}
    trainer = {
        "init": {
            "device": "cpu",
            "model_dir": str(tmp_path / "run"),
            "model": settings,
            "optimizer": {"SGD": {"lr": 0.1}},
            "loop": {"num_epochs": 1},
        },
        "fit": {"train_dataloader": place, "val_dataloader": place},
    }
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    code = main(["fit", str(file)])
    out, said = capsys.readouterr()
    return code, out + said


@pytest.mark.parametrize(
    ("model", "missing", "facts"),
    [
        ({}, False, []),
        ({"image_start_idx": 3}, False, ["a.h5: dataset 'data', row 0", "image_start_idx"]),
        ({}, True, ["b.h5: dataset 'img_path', row 0", "c0/3.png", "does not exist"]),
    ],
)
@pytest.mark.slow_cases("model1*")
def test_bad_data_ends_a_run_with_one_message(tmp_path, capsys, model, missing, facts):
    data = write(tmp_path / "data")
    if missing:
        (tmp_path / "data/images/c0/3.png").unlink()

    code, said = fit(tmp_path, capsys, data, **model)

    assert code == (2 if facts else 0)
    assert [fact for fact in facts if fact not in said] == []
    assert "Traceback" not in said
