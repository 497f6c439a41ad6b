"""Crops and masks of images: what they are, and what they depend on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.block_masks import BlockMasks
from modelzoo_trainer.zoo.data.images.dino import DinoImageDataProcessor
from modelzoo_trainer.zoo.data.images.multi_crop import CropSettings
from tests.zoo.data.images.views_arguments import arguments

Batch = dict[str, torch.Tensor]


def make(root: Any, **changes: Any) -> DinoImageDataProcessor:
    return DinoImageDataProcessor(**arguments(str(root), **changes))


def loaded(
    root: Any, indices: list[int], position: int | None, epoch: int = 0, **given: Any
) -> Batch:
    """Return a batch, or a part of one, as a trainer loads it."""
    dataset: Any = make(root, **given).dataset
    dataset.set_epoch(epoch)
    if position is not None:
        dataset.set_position(position)
    found: Batch = dataset.__getitems__(indices)
    return found


def test_a_batch_has_views_masks_and_labels(folder) -> None:
    root = folder(2, 3)

    batch = next(iter(make(root, shuffle=False).create_dataloader()))

    shapes = {key: (tuple(one.shape), one.dtype) for key, one in batch.items()}
    assert shapes == {
        "global_view": ((4, 2, 3, 8, 8), torch.float32),
        "local_view": ((4, 3, 3, 4, 4), torch.float32),
        "labels": ((4,), torch.int32),
        "collated_masks": ((4, 2, 16), torch.bool),
    }
    assert batch["labels"].tolist() == [0, 0, 0, 1]
    views = batch["global_view"]
    assert len({one.numpy().tobytes() for one in views.flatten(0, 1)}) == 8
    assert views.min() >= -4  # (x - mean) / std of x from 0 to 1
    assert views.max() <= 7
    sample = make(root).dataset[-1]
    assert (sample["global_view"].shape, sample["labels"].item()) == ((2, 3, 8, 8), 1)


def test_crops_depend_on_seed_epoch_image_and_place_alone(folder) -> None:
    root = folder()
    first = loaded(root, [0, 5, 7], 0)
    second = loaded(root, [5, 7], 1)
    for key in ("global_view", "local_view"):
        assert torch.equal(first[key][1:], second[key])
        assert not torch.equal(first[key], loaded(root, [0, 5, 7], 0, epoch=1)[key])
        assert not torch.equal(first[key], loaded(root, [0, 5, 7], 0, shuffle_seed=6)[key])
        assert not torch.equal(first[key], loaded(root, [0, 5, 7], 3)[key])


def test_an_image_that_is_repeated_has_other_crops(folder) -> None:
    root = folder(1, 2)
    for key in ("global_view", "local_view"):
        views = [loaded(root, [0, 1, 0, 0], position)[key] for position in (0, 4)]
        assert len({one.numpy().tobytes() for one in torch.cat(views)}) == 8


def test_masks_depend_on_seed_epoch_and_place_in_the_epoch_alone(folder) -> None:
    root = folder()
    whole = [loaded(root, [0, 1, 2, 3], 4 * number)["collated_masks"] for number in range(2)]
    parts = [loaded(root, [3, 9], 4 + 2 * part)["collated_masks"] for part in range(2)]
    assert torch.equal(whole[1], torch.cat(parts))
    across = loaded(root, [5, 5, 5, 5], 2)["collated_masks"]  # after a resume with another size
    assert torch.equal(across, torch.cat((whole[0][2:], whole[1][:2])))
    others = [
        loaded(root, [0, 1, 2, 3], 4),
        loaded(root, [0, 1, 2, 3], 0, epoch=1),
        loaded(root, [0, 1, 2, 3], 0, shuffle_seed=6),
        loaded(root, [0, 1, 2, 3], None),
    ]
    found = {
        one.numpy().tobytes() for one in (whole[0], *(one["collated_masks"] for one in others))
    }
    assert len(found) == 5


def test_a_share_of_the_views_of_a_batch_is_masked(folder) -> None:
    transform = arguments("")["ssl_transform"]
    transform["masked_patch_transform"] |= {"mask_probability": 0.3, "patch_size": 1}
    batch = loaded(folder(), list(range(10)), 0, batch_size=10, ssl_transform=transform)
    shares = batch["collated_masks"].flatten(0, 1).float().mean(dim=1)
    masked = sorted(share for share in shares.tolist() if share)
    assert len(masked) == int(20 * 0.3)
    for number, share in enumerate(masked):  # one in each sixth of the range
        assert share <= 0.1 + (number + 1) * 0.4 / 6
    assert masked[-1] > 0.3


def test_ratios_are_in_equal_parts_of_the_range_in_random_places() -> None:
    masks = BlockMasks(
        image_size=8, patch_size=2, mask_probability=0.5, mask_ratio_tuple=[0.1, 0.5]
    )
    found = masks.ratios(8, 1)
    expected = [[0.1, 0.2], [0.2, 0.3], [0.3, 0.4], [0.4, 0.5]]
    np.testing.assert_allclose(sorted(row for row in found.tolist() if row[1]), expected)
    assert not np.array_equal(found, masks.ratios(8, 2))


def test_masks_are_blocks_within_the_image() -> None:
    masks = BlockMasks(image_size=20, patch_size=1, mask_probability=1, mask_ratio_tuple=[0, 1])
    for seed in range(50):
        mask = masks.mask(0.3, 0.4, random.Random(seed)).reshape(20, 20)
        assert 0.15 * 400 < mask.sum() <= 0.4 * 400
        alone = 0
        for row, column in zip(*mask.nonzero(), strict=True):
            near = mask[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
            alone += near.sum() == 1
        assert alone <= 2
    assert not masks.mask(0.0, 0.0, random.Random(1)).any()


def test_values_of_crops_are_spread_over_them() -> None:
    given = arguments("")["ssl_transform"]["multi_crop_transform"]
    crops = CropSettings(**given).crops("here")
    assert [crop.pipeline.images[3].p for crop in crops] == [1.0, 0.1, 0.5, 0.5, 0.5]  # type: ignore[attr-defined]
    assert [crop.side for crop in crops] == [8, 8, 4, 4, 4]
    assert {crop.first.interpolation for crop in crops} == {"bicubic"}
    given |= {"local_num_crops": 1}  # as many crops as channels
    for index in (3, 4):
        given["multicrop_transform_list"][index]["p"] = [0.1, 0.2, 0.3]
    crops = CropSettings(**given).crops("here")
    assert [crop.pipeline.images[4].p for crop in crops] == [0.1, 0.2, 0.3]  # type: ignore[attr-defined]
    assert {tuple(crop.pipeline.numbers[0].mean) for crop in crops} == {(0.5, 0.4, 0.3)}


def test_without_masks_and_local_crops_a_batch_lacks_them(folder) -> None:
    given = arguments("")["ssl_transform"]
    del given["masked_patch_transform"]
    given["multi_crop_transform"] |= {
        "local_num_crops": 0,
        "multicrop_transform_list": [{"name": "to_tensor"}],
    }
    batch = loaded(folder(), [0, 1], 0, ssl_transform=given)
    assert set(batch) == {"global_view", "labels"}


def changed(path: str, value: Any) -> dict[str, Any]:
    given = arguments("./none")
    place: Any = given
    *inner, last = [int(one) if one.isdigit() else one for one in path.split("/")]
    for one in inner:
        place = place[one]
    place[last] = value
    return given


LIST = "ssl_transform/multi_crop_transform/multicrop_transform_list"


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        ("dataset/name", "cifar", ["dataset.name", "cifar", "Imagenet"]),
        ("dataset/split", "test", ["dataset.split", "test"]),
        ("dataset/root", "", ["dataset.root"]),
        ("dataset/rot", 1, ["dataset.rot", "root"]),
        ("ssl_transform/name", "Dinov3", ["ssl_transform.name", "Dinov2Transform"]),
        ("ssl_transform/multi_crop_transform/global_num_crops", 0, ["global_num_crops", "0"]),
        ("ssl_transform/multi_crop_transform/local_crops_scale", [0.3, 0.1], ["local_crops_scale"]),
        ("ssl_transform/multi_crop_transform/global_image_size", 12, ["image_size is 8", "12"]),
        (f"{LIST}/3/p", [1.0, 0.5], ["[3]", "p"]),
        (f"{LIST}/3/name", "blur", ["multicrop_transform_list[3]", "blur"]),
        (f"{LIST}/5", {"name": "resize", "size": 3}, ["to_tensor", "0 times"]),
        (f"{LIST}/2", {"name": "center_crop", "size": 3}, ["8 x 8", "(3, 3)"]),
        ("ssl_transform/masked_patch_transform/patch_size", 3, ["image_size 8", "patch_size 3"]),
        ("ssl_transform/masked_patch_transform/mask_probability", 2, ["mask_probability", "2"]),
        ("ssl_transform/masked_patch_transform/mask_ratio_tuple", [0.5, 0.1], ["mask_ratio_tuple"]),
        ("pad_last", True, ["pad_last"]),
    ],
)
def test_invalid_settings_are_named_without_data(path: str, value: Any, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DinoImageDataProcessor.check_arguments(**changed(path, value))
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_missing_data_is_reported_and_damaged_images_are_named(folder, tmp_path) -> None:
    (problem,) = DinoImageDataProcessor.check_arguments(**arguments(str(tmp_path / "none")))
    assert "dataset.root" in problem
    with pytest.raises(ConfigError, match=r"dataset\.root"):
        make(tmp_path / "none")
    root = folder()
    path = root / "train" / "c1" / "0.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"c1/0\.png.*truncated"):
        loaded(root, [4], 0)


def test_an_epoch_may_have_fewer_samples(folder) -> None:
    processor = make(folder(3, 4), num_samples=8)
    assert len(processor.create_dataloader()) == 2
