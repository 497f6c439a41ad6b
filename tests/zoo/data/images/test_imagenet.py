"""Batches of images in folders of classes."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data import stream_processor
from modelzoo_trainer.zoo.data.images.folders import find_images
from modelzoo_trainer.zoo.data.images.imagenet import ImageNet1KProcessor
from tests.zoo.data.images.written import pixels, write_images

RANDOM = [
    {"name": "random_resized_crop", "size": [6, 5]},
    {"name": "random_horizontal_flip"},
    {"name": "to_tensor"},
]
TENSOR = [{"name": "to_tensor"}]


def make(folder: Path, **arguments: Any) -> ImageNet1KProcessor:
    return ImageNet1KProcessor(
        **{
            "data_dir": str(folder),
            "batch_size": 4,
            "image_size": [12, 8],
            "transforms": TENSOR,
            "shuffle_seed": 3,
            **arguments,
        }
    )


def batches(folder: Path, epoch: int = 0, **arguments: Any) -> list[Any]:
    processor = make(folder, **arguments)
    loader: Any = processor.create_dataloader()
    loader.sampler.set_epoch(epoch)
    processor.dataset.set_epoch(epoch)
    return list(loader)


def places(batch: Any) -> list[tuple[int, int]]:
    """Return class and image of each, from the pixels."""
    found = (batch[0][:, :2, 0, 0] * 25.5).round().int()
    return [tuple(row) for row in found.tolist()]


def test_a_batch_has_pixels_and_classes(folder) -> None:
    data = folder(2, 3)
    normalize = {"name": "normalize", "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.2, 0.1]}
    options: dict[str, Any] = {"batch_size": 6, "shuffle": False}

    ((images, labels),) = batches(data, transforms=[*TENSOR, normalize], **options)

    assert (images.dtype, labels.dtype) == (torch.float32, torch.int32)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    raw = torch.from_numpy(pixels(1, 2)).permute(2, 0, 1) / 255
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.2, 0.1])
    torch.testing.assert_close(images[5], (raw - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    ((resized, _),) = batches(data, transforms=None, noaugment=True, image_size=[3, 4], **options)
    assert resized.shape == (6, 3, 3, 4)
    sample = make(data).dataset[-1]
    assert (sample[0].shape, sample[1].item()) == ((3, 12, 8), 1)


def test_only_training_images_are_shuffled_and_no_one_is_lost(folder) -> None:
    data = folder(2, 3)
    in_order = [(label, number) for label in range(2) for number in range(3)]
    loader: Any = make(data).create_dataloader()
    seen = [place for _ in range(3) for batch in loader for place in places(batch)]
    assert len(loader) == 1
    assert (seen[:6] != in_order, sorted(seen[:6])) == (True, in_order)
    assert (seen[6:] != seen[:6], sorted(seen[6:])) == (True, in_order)
    val = batches(data, split="val", drop_last=False)
    assert [place for batch in val for place in places(batch)] == in_order


def test_random_transforms_depend_on_seed_epoch_and_image_alone(folder) -> None:
    data = folder(3, 4)
    options: dict[str, Any] = {"transforms": RANDOM, "image_size": [6, 5], "shuffle": False}

    first = [images for images, _ in batches(data, **options)]

    again = [images for images, _ in batches(data, batch_size=12, **options)]
    assert torch.equal(torch.cat(first), torch.cat(again))
    other_epoch = batches(data, epoch=1, **options)
    assert not torch.equal(other_epoch[0][0], first[0])
    other_seed = batches(data, shuffle_seed=4, **options)
    assert not torch.equal(other_seed[0][0], first[0])


@pytest.mark.slow
def test_workers_load_the_same_batches(folder) -> None:
    data = folder(3, 4)
    here = batches(data, transforms=RANDOM, image_size=[6, 5])
    there = batches(data, transforms=RANDOM, image_size=[6, 5], num_workers=2)
    for (images, labels), (others, their_labels) in zip(here, there, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)


def test_images_are_found_by_name_in_folders_too(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(stream_processor, "_SAID", set())
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    hidden = ("a/.hidden", "a/._9.webp", "a/.x/1.png", ".cache/1.png")
    for name in ("b/2.JPG", "b/1.png", "a/x/3.tiff", "a/9.webp", "a/note.txt", *hidden):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "train" / "meta.bin").touch()

    files = find_images(str(tmp_path), "train")

    found = [os.path.relpath(files.path(index), files.folder) for index in range(len(files))]
    assert found == ["a/9.webp", "a/x/3.tiff", "b/1.png", "b/2.JPG"]
    assert files.labels.tolist() == [0, 0, 1, 1]
    assert "a/note.txt" in caplog.text
    assert ".hidden" not in caplog.text
    before = files.fingerprint
    (tmp_path / "train/b/3.png").touch()
    assert find_images(str(tmp_path), "train").fingerprint != before


def test_classes_are_numbered_by_those_of_train(folder) -> None:
    data = folder(3, 2)
    shutil.rmtree(data / "val/c1")

    files = find_images(str(data), "val")

    assert (files.classes, files.labels.tolist()) == (("c0", "c1", "c2"), [0, 0, 2, 2])
    (data / "val/c0").rename(data / "val/d0")
    with pytest.raises(ConfigError, match=r"val/d0.*1 of 2.*train"):
        find_images(str(data), "val")
    shutil.rmtree(data / "train")
    assert find_images(str(data), "val").labels.tolist() == [0, 0, 1, 1]


def test_a_folder_that_contains_itself_is_refused(folder) -> None:
    data = folder(2, 1)
    (data / "train/c0/inside").mkdir()
    (data / "train/c0/inside/linked").symlink_to(data / "train/c1")
    assert len(find_images(str(data), "train")) == 3
    (data / "train/c1/again").symlink_to(data / "train/c1")
    with pytest.raises(ConfigError, match=r"c0/inside/linked/again: .*link"):
        find_images(str(data), "train")


def test_a_model_with_fewer_classes_is_refused(folder) -> None:
    data = folder(3, 2)
    loader = make(data).create_dataloader()

    class Model:
        num_classes = 3

    check_model(loader, Model())
    Model.num_classes = 2
    with pytest.raises(ConfigError, match=r"model's num_classes is 2.*3 folders"):
        check_model(loader, Model())
    with pytest.raises(ConfigError, match=r"num_classes is 2.*3 folders"):
        make(data, num_classes=2)


def test_what_has_no_effect_is_said_once(folder, caplog, monkeypatch) -> None:
    monkeypatch.setattr(stream_processor, "_SAID", set())
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    data = folder(1, 4)
    given = ("mixup_alpha", "mixed_precision", "fp16_type")
    make(data, cutmix_alpha=0, mixed_precision=False)
    for _ in range(2):
        make(data, **dict.fromkeys(given, 0.1), use_worker_cache=True, noaugment=True)
    for name in (*given, "use_worker_cache", "transforms"):
        assert caplog.text.count(f"ImageNet1KProcessor.{name} has no effect") == 1
    assert "cutmix_alpha" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"data_dir": "nowhere"}, "'nowhere' does not exist"),
        ({"data_dir": ["a", "b"]}, r"data_dir.*\['a', 'b'\]"),
        ({"split": "test"}, "split.*'test'"),
        ({"transforms": None}, "transforms: missing"),
        ({"sampler": "repeated-aug"}, "sampler is 'repeated-aug'"),
        ({"image_size": [12]}, "image_size"),
        ({"transforms": [{"name": "resize", "size": [9, 9]}, *TENSOR]}, r"\[12, 8\].*\[9, 9\]"),
    ],
)
def test_invalid_arguments_are_refused(folder, arguments: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=facts):
        make(folder(1, 4), **arguments)


def test_a_check_finds_them_without_opening_files(tmp_path) -> None:
    check = ImageNet1KProcessor.check_arguments
    given: dict[str, Any] = {"transforms": TENSOR, "image_size": [8, 8]}
    (tmp_path / "train").mkdir()
    assert check(data_dir=str(tmp_path), **given) == []
    (lack,) = check(data_dir=str(tmp_path), split="val", **given)
    assert "val' does not exist" in lack
    with pytest.raises(ConfigError, match="transforms: missing"):
        check(data_dir="a")
    with pytest.raises(ConfigError, match="repeated-aug"):
        check(data_dir="a", sampler="repeated-aug", **given)


def test_folders_without_classes_or_images_are_refused(tmp_path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigError, match=r"train.*has no folder"):
        make(tmp_path)
    write_images(tmp_path / "train", 1, 1)
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"train/empty: a class without an image"):
        make(tmp_path)


@pytest.mark.parametrize("kind", ["truncated", "size"])
def test_an_image_that_does_not_fit_is_named(folder, kind: str) -> None:
    data = folder(1, 4)
    path = data / "train/c0/2.png"
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:50])
    else:
        write_images(data / "other", 1, 3, (9, 8))
        path.write_bytes((data / "other/c0/2.png").read_bytes())
    facts = {"truncated": "truncated", "size": "9 x 8.*12 x 8"}
    with pytest.raises(ConfigError, match=rf"c0/2\.png: .*{facts[kind]}"):
        batches(data)
    small = [{"name": "random_crop", "size": [12, 8]}, *TENSOR]
    if kind == "size":
        with pytest.raises(ConfigError, match=r"c0/2\.png: .*pad_if_needed"):
            batches(data, transforms=small)
