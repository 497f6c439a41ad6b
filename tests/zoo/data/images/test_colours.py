"""Random colours, blur and solarization."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.transforms import parse_transforms


def image() -> Any:
    values = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    return Image.fromarray(values)


def changed(seed: int = 1, **given: Any) -> Any:
    (transform,) = parse_transforms([given, {"name": "to_tensor"}]).images
    return np.asarray(transform(image(), random.Random(seed)))


def test_a_jitter_multiplies_by_a_factor_in_the_range() -> None:
    for key, name in (
        ("brightness", "Brightness"),
        ("contrast", "Contrast"),
        ("saturation", "Color"),
    ):
        found = changed(name="color_jitter_with_prob", p=1, **{key: 0.4})
        draw = random.Random(1)
        draw.random()
        factor = draw.uniform(0.6, 1.4)
        expected = getattr(ImageEnhance, name)(image()).enhance(factor)
        np.testing.assert_array_equal(found, np.asarray(expected))


def test_a_hue_is_shifted_around_the_circle() -> None:
    found = changed(name="color_jitter_with_prob", hue=0.5)
    share = random.Random(1).uniform(-0.5, 0.5)
    before = np.asarray(image().convert("HSV")).astype(int)
    before[..., 0] = (before[..., 0] + int(share * 255)) % 256
    expected = Image.fromarray(before.astype(np.uint8), "HSV").convert("RGB")
    np.testing.assert_array_equal(found, np.asarray(expected))


def test_all_changes_come_in_a_random_order_and_zero_probability_is_always() -> None:
    every = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
    found = {changed(seed, name="color_jitter_with_prob", **every).tobytes() for seed in range(20)}
    assert len(found) == 20
    seldom = [changed(seed, name="color_jitter_with_prob", p=0.3, **every) for seed in range(200)]
    num = sum(not np.array_equal(one, np.asarray(image())) for one in seldom)
    assert 30 < num < 90


def test_a_blur_has_a_radius_in_the_range() -> None:
    given: dict[str, Any] = {"name": "random_gaussian_blur_random_radius", "p": 1.0}
    found = changed(**given, radius_min=0.1, radius_max=2.0)
    draw = random.Random(1)
    draw.random()
    expected = image().filter(ImageFilter.GaussianBlur(draw.uniform(0.1, 2.0)))
    np.testing.assert_array_equal(found, np.asarray(expected))
    np.testing.assert_array_equal(changed(**{**given, "p": 0.0}), np.asarray(image()))


def test_solarization_inverts_values_from_the_threshold_on() -> None:
    before = np.asarray(image())
    found = changed(name="random_solarize", threshold=128, p=1.0)
    np.testing.assert_array_equal(found, np.where(before < 128, before, 255 - before))
    np.testing.assert_array_equal(changed(name="random_solarize", threshold=128, p=0.0), before)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"name": "random_solarize"}, ["threshold"]),
        ({"name": "random_solarize", "threshold": 300}, ["threshold", "300"]),
        ({"name": "color_jitter_with_prob", "hue": 0.6}, ["hue", "0.6"]),
        ({"name": "color_jitter_with_prob", "brightness": [0.5, 1.5]}, ["brightness"]),
        (
            {"name": "random_gaussian_blur_random_radius", "radius_min": 3.0},
            ["radius_min", "3.0", "2.0"],
        ),
    ],
)
def test_invalid_arguments_are_named(given: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_transforms([given, {"name": "to_tensor"}])
    assert [fact for fact in ["transforms[0]", *facts] if fact not in str(caught.value)] == []
