"""Batches of latents with classes, timesteps and noise."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data import stream_processor
from modelzoo_trainer.zoo.data.images.diffusion import DiffusionLatentImageNet1KProcessor
from modelzoo_trainer.zoo.data.images.latents import sampled
from tests.zoo.data.images.written import moments, write_latents

SETTINGS: dict[str, Any] = {
    "latent_size": [4, 6],
    "latent_channels": 2,
    "vae_scaling_factor": 0.5,
    "label_dropout_rate": 0.0,
    "num_classes": 9,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_latents(tmp_path / "data" / split, 3, 4)
    return tmp_path / "data"


def make(folder: Path | list[Path], **arguments: Any) -> DiffusionLatentImageNet1KProcessor:
    folders = [str(one) for one in folder] if isinstance(folder, list) else str(folder)
    given = {"data_dir": folders, "batch_size": 4, "shuffle_seed": 3, **SETTINGS, **arguments}
    return DiffusionLatentImageNet1KProcessor(**given)


def batches(folder: Path | list[Path], epoch: int = 0, **arguments: Any) -> list[Any]:
    processor = make(folder, **arguments)
    loader: Any = processor.create_dataloader()
    loader.sampler.set_epoch(epoch)
    processor.dataset.set_epoch(epoch)
    return list(loader)


def joined(found: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}


def numbers(batch: Any) -> list[int]:
    """Return class * 10 + file of each sample."""
    return [round(one) for one in (batch["input"][:, 0, 0, 0] / 0.5).tolist()]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_has_latents_labels_noise_and_timesteps(data) -> None:
    (batch,) = batches(data, batch_size=12, shuffle=False, num_diffusion_steps=7)

    assert {name: tuple(one.shape) for name, one in batch.items()} == {
        "input": (12, 2, 4, 6),
        "label": (12,),
        "diffusion_noise": (12, 2, 4, 6),
        "timestep": (12,),
    }
    floating = {name: one.dtype for name, one in batch.items() if one.is_floating_point()}
    assert floating == dict.fromkeys(("input", "diffusion_noise"), torch.float32)
    assert {batch[name].dtype for name in ("label", "timestep")} == {torch.int32}
    assert numbers(batch) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert batch["label"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert 0 <= batch["timestep"].min() <= batch["timestep"].max() <= 6
    assert len(batch["timestep"].unique()) > 2
    assert batch["diffusion_noise"].std().item() == pytest.approx(1, abs=0.1)
    spread = batch["input"] - batch["input"].round(decimals=1)
    assert 0 < spread.abs().max() < 1e-3
    sample = make(data).dataset[-1]
    assert (sample["input"].shape, sample["label"].item()) == ((2, 4, 6), 2)


def test_a_latent_is_drawn_with_its_mean_and_variance() -> None:
    values = torch.tensor([[[[1.0]], [[2.0]], [[100.0]], [[-100.0]]]])
    draws = torch.tensor([[[[0.5]], [[4.0]]]])
    found = sampled(values, draws).flatten().tolist()
    assert found == pytest.approx([1 + 0.5 * np.exp(10), 2 + 4 * np.exp(-15)])


def test_draws_depend_on_seed_epoch_and_sample_alone(data) -> None:
    options: dict[str, Any] = {"shuffle": False, "label_dropout_rate": 0.5}
    first = joined(batches(data, **options))
    assert same(first, joined(batches(data, batch_size=3, **options)))
    for changed in ({"epoch": 1}, {"shuffle_seed": 4}):
        other = joined(batches(data, **{**options, **changed}))
        for name in ("label", "diffusion_noise", "timestep"):
            assert not torch.equal(first[name], other[name])
    shuffled = joined(batches(data, label_dropout_rate=0.5))
    order = [numbers(first).index(one) for one in numbers(shuffled)]
    assert order != sorted(order)
    assert same(shuffled, {name: one[order] for name, one in first.items()})


@pytest.mark.slow
def test_workers_load_the_same_batches(data) -> None:
    here, there = batches([data, data]), batches([data, data], num_workers=2)
    assert all(same(*pair) for pair in zip(here, there, strict=True))


def test_labels_are_dropped_with_their_rate(data) -> None:
    dataset = make(data, label_dropout_rate=0.25).dataset
    labels = []
    for epoch in range(25):
        dataset.set_epoch(epoch)
        labels += dataset.__getitems__(list(range(12)))["label"].tolist()
    assert {*labels} == {0, 1, 2, 9}
    assert labels.count(9) / len(labels) == pytest.approx(0.25, abs=0.07)


def test_each_sample_comes_from_one_of_the_folders(data, tmp_path) -> None:
    write_latents(tmp_path / "flipped" / "train", 3, 5, offset=5)
    both = [data, tmp_path / "flipped"]
    found = [
        number
        for epoch in range(8)
        for batch in batches(both, epoch, batch_size=15, shuffle=False)
        for number in numbers(batch)
    ]
    assert len(found) == 8 * 15
    plain = [number for number in found if number % 10 < 5]
    assert 0.3 < len(plain) / len(found) < 0.7
    assert {*found} == {c * 10 + n for c in range(3) for n in (0, 1, 2, 3, 5, 6, 7, 8, 9)}
    shutil.rmtree(tmp_path / "flipped/train/c1")
    with pytest.raises(ConfigError, match=r"flipped/train.*different classes.*'c1'"):
        make(both)


class Model:
    num_classes = 7
    num_diffusion_steps = 5
    label_dropout_rate = 0.99
    latent_size = (4, 6)
    latent_channels = 2
    vae_scaling_factor = 2.0
    schedule_name = "linear"


def test_settings_that_are_not_given_are_those_of_the_model(data) -> None:
    processor = make(data, **dict.fromkeys(SETTINGS), batch_size=12, shuffle=False)
    loader: Any = processor.create_dataloader()
    check_model(loader, Model())
    (batch,) = loader
    assert 7 in batch["label"].tolist()
    assert batch["timestep"].max() < 5
    assert [round(one) for one in (batch["input"][:, 0, 0, 0] / 2).tolist()][:5] == [0, 1, 2, 3, 10]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"num_classes": 6}, "num_classes is 6.*7 in the model"),
        ({"latent_size": [6, 4]}, r"latent_size is \[6, 4\].*\(4, 6\)"),
        ({"num_diffusion_steps": 4}, "num_diffusion_steps is 4.*5"),
        ({"vae_scaling_factor": 1.0}, "vae_scaling_factor is 1.0.*2.0"),
    ],
)
def test_other_settings_than_those_of_the_model_are_refused(data, given, facts) -> None:
    loader = make(data, **{**dict.fromkeys(SETTINGS), **given}).create_dataloader()
    with pytest.raises(ConfigError, match=facts):
        check_model(loader, Model())


def write(path: Path, **arrays: Any) -> None:
    np.savez(path, **{"vae_output": moments(1, 2), "label": np.int64(1), **arrays})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def single(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, moments(1, 2))


def lacking(path: Path) -> None:
    np.savez(path, latent=moments(1, 2))


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (cut, "damaged, truncated"),
        (lambda path: path.write_text("text"), "damaged, truncated"),
        (single, "npz archive"),
        (lacking, r"no 'vae_output'.*'latent'"),
        (lambda path: write(path, vae_output=moments(1, 2, 3)), r"\(6, 4, 6\).*\(4, 4, 6\)"),
        (lambda path: write(path, vae_output=moments(1, 2).astype(np.int8)), "int8.*floating"),
        (lambda path: write(path, vae_output=moments(1, 2) * np.nan), "NaN"),
        (lambda path: write(path, label=np.int64(9)), "label is 9.*num_classes is 9"),
        (lambda path: write(path, label=np.int64(-1)), "label is -1"),
        (lambda path: write(path, label=np.arange(2)), r"label has the shape \(2,\)"),
        (lambda path: write(path, label=np.array([None])), "damaged"),
    ],
)
def test_a_file_that_does_not_fit_is_named(data, spoil, facts: str) -> None:
    path = data / "train/c1/2.npz"
    spoil(path)
    with pytest.raises(ConfigError, match=rf"train/c1/2\.npz: .*{facts}"):
        batches(data)


def test_a_label_differs_from_its_folder_only_if_classes_are_missing(data) -> None:
    write(data / "train/c1/2.npz", label=np.int64(2))
    assert sorted(joined(batches(data))["label"].tolist()) == [0] * 4 + [1] * 3 + [2] * 5
    with pytest.raises(ConfigError, match=r"c1/2\.npz: label is 2.*class 1 of all 3"):
        batches(data, num_classes=3)
    for path in data.glob("train/c1/*.npz"):
        np.savez(path, vae_output=moments(1, 2))  # without a label
    assert sorted(joined(batches(data, num_classes=3))["label"].tolist()) == sorted([0, 1, 2] * 4)


def test_what_has_no_effect_is_said_once(data, caplog, monkeypatch) -> None:
    monkeypatch.setattr(stream_processor, "_SAID", set())
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    given = {"image_channels": 3, "image_size": [8, 8], "fp16_type": "x", "use_worker_cache": True}
    for _ in range(2):
        make(data, **given, noaugment=True, transforms=[], var_loss=False)
    for name in (*given, "noaugment"):
        assert caplog.text.count(f"Processor.{name} has no effect") == 1


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"data_dir": "nowhere"}, r"'nowhere' does not exist.*FILE\.npz"),
        ({"data_dir": []}, r"data_dir.*\[\]"),
        ({"split": "test"}, "split.*'test'"),
        ({"transforms": [{"name": "resize"}]}, "transforms.*latents"),
        ({"var_loss": True}, "var_loss: false"),
        ({"num_classes": 2}, "num_classes is 2.*3 folders"),
        ({"label_dropout_rate": 1.0}, "label_dropout_rate"),
        ({"schedule_name": "cosine"}, "schedule_name"),
    ],
)
def test_invalid_arguments_are_refused(data, arguments: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        make(data, **arguments)


def test_a_check_finds_them_without_opening_files(tmp_path) -> None:
    check = DiffusionLatentImageNet1KProcessor.check_arguments
    (tmp_path / "train").mkdir()
    assert check(data_dir=str(tmp_path)) == []
    first, second = check(data_dir=[str(tmp_path), "none"], split="val")
    assert "val' does not exist" in first
    assert "'none' does not exist" in second
    with pytest.raises(ConfigError, match="transforms"):
        check(data_dir="a", transforms=[{}])


def test_a_folder_without_latents_is_refused(data) -> None:
    (data / "train/d").mkdir()
    with pytest.raises(ConfigError, match=r"train/d: a class without a file of latents"):
        make(data)
