"""Transforms of images: their formulas, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.transforms import parse_transforms

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 3)).astype(np.uint8)


def made(name: str, **arguments: Any) -> Any:
    (found,) = parse_transforms([{"name": name, **arguments}, {"name": "to_tensor"}]).images
    return found


def apply(name: str, seed: int = 0, pixels: Any = PIXELS, **arguments: Any) -> NDArray[np.uint8]:
    return np.asarray(made(name, **arguments)(Image.fromarray(pixels), random.Random(seed)))


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"size": [6, 5]}, (6, 5)),
        ({"size": 4}, (6, 4)),
        ({"size": [16]}, (24, 16)),
        ({"size": 6, "max_size": 8}, (8, 5)),
        ({"size": [12, 8]}, (12, 8)),
    ],
)
def test_resize_to_a_size_or_the_shorter_side(arguments: Any, shape: tuple[int, int]) -> None:
    found = apply("resize", **arguments)
    assert found.shape[:2] == shape
    expected = Image.fromarray(PIXELS).resize(shape[::-1], Image.Resampling.BILINEAR)
    assert np.array_equal(found, np.asarray(expected))
    assert not np.array_equal(
        apply("resize", size=[6, 5]), apply("Resize", size=[6, 5], interpolation="nearest")
    )


def test_crops_have_the_centre_or_a_random_part() -> None:
    assert np.array_equal(apply("center_crop", size=[4, 6]), PIXELS[4:8, 1:7])
    padded = apply("center_crop", size=10)
    assert np.array_equal(padded[:, 1:9], PIXELS[1:11])
    assert not padded[:, [0, 9]].any()
    cuts = {apply("random_crop", seed, size=[11, 7]).tobytes() for seed in range(30)}
    assert cuts == {
        PIXELS[top : top + 11, left : left + 7].tobytes() for top in (0, 1) for left in (0, 1)
    }
    with pytest.raises(ConfigError, match=r"20 x 20, got 12 x 8.*pad_if_needed: true"):
        apply("random_crop", size=20)


@pytest.mark.parametrize("size", [(14, 9), (14, 6), (10, 9)])
def test_random_crop_pads_both_sides_by_what_lacks(size: tuple[int, int]) -> None:
    height, width = size
    rows, columns = max(height - 12, 0), max(width - 8, 0)
    whole = np.pad(PIXELS, ((rows, rows), (columns, columns), (0, 0)))
    expected = {
        whole[top : top + height, left : left + width].tobytes()
        for top in range(whole.shape[0] - height + 1)
        for left in range(whole.shape[1] - width + 1)
    }
    found = {
        apply("random_crop", seed, size=size, pad_if_needed=True).tobytes() for seed in range(60)
    }
    assert found == expected


def test_random_resized_crop_has_areas_and_ratios_of_the_ranges() -> None:
    crop = made("random_resized_crop", size=[5, 6], scale=[0.2, 0.6], ratio=[0.5, 2.0])
    draw = random.Random(0)
    parts = [crop.part(800, 600, draw) for _ in range(300)]
    assert all(left >= 0 and left + width <= 800 for left, _, width, _ in parts)
    assert all(top >= 0 and top + height <= 600 for _, top, _, height in parts)
    areas = [width * height / 480_000 for _, _, width, height in parts]
    ratios = [width / height for _, _, width, height in parts]
    assert (min(areas), max(areas)) == pytest.approx((0.2, 0.6), abs=0.02)
    assert (min(ratios), max(ratios)) == pytest.approx((0.5, 2.0), abs=0.1)
    assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.1)
    assert apply("random_resized_crop", size=[5, 6]).shape == (5, 6, 3)
    whole = made("random_resized_crop", size=4, scale=[1.0, 1.0], ratio=[1.0, 1.0])
    assert whole.part(80, 60, draw) == (10, 0, 60, 60)  # no try fits
    assert whole.part(60, 80, draw) == (0, 10, 60, 60)
    inside = made("random_resized_crop", size=4, scale=[9.0, 9.0], ratio=[0.5, 2.0])
    assert inside.part(80, 60, draw) == (0, 0, 80, 60)
    extreme = [1e-9, 1e9]
    part = made("random_resized_crop", size=4, scale=extreme, ratio=extreme).part(9000, 9000, draw)
    assert all(0 <= one <= 9000 for one in part)


def test_flips_and_grey_values_have_their_probability() -> None:
    assert np.array_equal(apply("random_horizontal_flip", p=1.0), PIXELS[:, ::-1])
    assert np.array_equal(apply("random_vertical_flip", p=1.0), PIXELS[::-1])
    assert np.array_equal(apply("random_vertical_flip", p=0.0), PIXELS)
    num = sum(
        np.array_equal(apply("random_horizontal_flip", seed, p=0.25), PIXELS) for seed in range(400)
    )
    assert num == pytest.approx(300, abs=30)
    grey = apply("random_grayscale", p=1.0)
    luma = PIXELS @ [0.299, 0.587, 0.114]  # ITU-R 601-2
    assert np.abs(grey[..., 0] - luma).max() <= 1
    assert (grey == grey[..., :1]).all()
    assert np.array_equal(apply("random_gray_scale", p=0.0), PIXELS)


def test_expand_to_square_adds_a_border() -> None:
    found = apply("expand_to_square", background_color=[1, 2, 3])
    assert found.shape == (12, 12, 3)
    assert np.array_equal(found[:, 2:10], PIXELS)
    assert found[0, 0].tolist() == [1, 2, 3]
    assert apply("expand_to_square", pixels=PIXELS[:8], background_color=[1, 2, 3]).shape[0] == 8


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ([{"name": "resise", "size": 3}], r"transforms\[0\].*'resise'.*'resize'"),
        ([{"name": "randaug"}], r"transforms\[0\].*'randaug'.*random_resized_crop"),
        (["resize"], r"transforms\[0\].*mapping.*'resize'"),
        ([{"name": "resize"}], r"transforms\[0\]: resize requires size"),
        ([{"name": "resize", "size": 0}], r"transforms\[0\]\.size.*0"),
        ([{"name": "resize", "size": [1, 2, 3]}], r"transforms\[0\]\.size"),
        ([{"name": "resize", "size": 3, "sise": 3}], r"transforms\[0\]\.sise: .*'size'"),
        ([{"name": "resize", "size": [3, 4], "max_size": 9}], r"transforms\[0\].*max_size.*9"),
        ([{"name": "resize", "size": 3, "interpolation": "x"}], "interpolation.*'x'"),
        ([{"name": "random_resized_crop", "size": 3, "scale": [1.0, 0.5]}], "scale.*smaller"),
        ([{"name": "random_resized_crop", "size": 3, "scale": [1e307, 1e308]}], r"scale.*1e\+307"),
        ([{"name": "random_resized_crop", "size": 3, "ratio": [1e-320, 1.0]}], "ratio.*1e-320"),
        ([{"name": "random_horizontal_flip", "p": 1.5}], r"transforms\[0\]\.p.*1\.5"),
        ([], "to_tensor.*0 times"),
        ([{"name": "to_tensor"}], "to_tensor.*2 times"),
        ([{"name": "normalize", "mean": [0, 0, 0], "std": [1, 1, 1]}], r"normalize.*after"),
        ([{"name": "normalize", "mean": [0, 0, 0], "std": [1, 0, 1]}], r"transforms\[0\]\.std"),
        ([{"name": "normalize", "mean": [0], "std": [1, 1, 1]}], r"transforms\[0\]\.mean"),
    ],
)
def test_invalid_transforms_are_refused(given: list[Any], facts: str) -> None:
    tensor = [{"name": "to_tensor"}] if given else []
    with pytest.raises(ConfigError, match=facts):
        parse_transforms(given + tensor)


def test_transforms_of_images_come_before_to_tensor() -> None:
    with pytest.raises(ConfigError, match=r"transforms\[1\]: resize must be before to_tensor"):
        parse_transforms([{"name": "to_tensor"}, {"name": "resize", "size": 3}])


def test_the_size_after_all_is_known_where_it_does_not_depend_on_the_image() -> None:
    tensor = {"name": "to_tensor"}
    side, crop = {"name": "resize", "size": 9}, {"name": "center_crop", "size": [4, 5]}
    square = {"name": "expand_to_square", "background_color": [0, 0, 0]}
    assert parse_transforms([side, tensor]).size is None
    assert parse_transforms([crop, side, square, tensor]).size == (11, 11)
    assert parse_transforms([side, crop, tensor]).size == (4, 5)
