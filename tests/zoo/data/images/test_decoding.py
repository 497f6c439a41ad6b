"""Images of any kind as RGB, and files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.images.decoding import read_rgb

GREY = (np.arange(12).reshape(3, 4) * 20).astype(np.uint8)
COLOURS = np.stack([GREY, GREY[::-1], 255 - GREY], axis=-1)


def read(path: Path, image: Any, **options: Any) -> Any:
    image.save(path, **options)
    found = read_rgb(str(path))
    assert found.mode == "RGB"
    return np.asarray(found)


def test_colours_are_read_as_they_are(tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS)
    assert np.array_equal(read(tmp_path / "a.png", image), COLOURS)
    assert np.array_equal(read(tmp_path / "b.webp", image, lossless=True), COLOURS)
    assert np.array_equal(read(tmp_path / "c.tiff", image.convert("RGBA")), COLOURS)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_grey_values_of_any_depth_become_equal_parts(tmp_path: Path, dtype: Any) -> None:
    values = GREY.astype(dtype) * (1 if dtype is np.uint8 else 257)
    ending = "tiff" if dtype is np.int32 else "png"
    found = read(tmp_path / f"a.{ending}", Image.fromarray(values))
    assert np.array_equal(found, np.repeat(GREY[..., None], 3, axis=-1))


def test_palettes_and_other_modes_are_converted(tmp_path: Path) -> None:
    palette = Image.fromarray(COLOURS).quantize(12)
    plain = np.asarray(palette.convert("RGB"))
    assert np.array_equal(read(tmp_path / "a.png", palette), plain)
    transparent = read(tmp_path / "b.png", palette, transparency=bytes([0] * 3 + [255] * 9))
    assert np.array_equal(transparent, plain)
    bits = read(tmp_path / "c.png", Image.fromarray(GREY > 100))
    assert np.array_equal(bits[..., 0], np.where(GREY > 100, 255, 0))
    with_alpha = read(tmp_path / "d.png", Image.fromarray(GREY).convert("LA"))
    assert np.array_equal(with_alpha[..., 1], GREY)
    cmyk = Image.fromarray(COLOURS).convert("CMYK")
    found = read(tmp_path / "e.jpg", cmyk, quality=100)
    assert np.abs(found.astype(int) - COLOURS).max() < 40  # compressed


@pytest.mark.parametrize("kind", ["text", "empty", "truncated", "truncated jpeg", "float", "deep"])
def test_what_is_no_image_of_known_colours_is_refused_with_its_path(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / ("a.tiff" if kind in ("float", "deep") else "a.png")
    match kind:
        case "text":
            path.write_text("not an image")
        case "empty":
            path.write_bytes(b"")
        case "truncated" | "truncated jpeg":
            noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(noise).save(path, format="PNG" if kind == "truncated" else "JPEG")
            path.write_bytes(path.read_bytes()[:900])
        case "float":
            Image.fromarray(GREY.astype(np.float32)).save(path)
        case "deep":
            Image.fromarray(GREY.astype(np.int32) * 100_000).save(path)
    with pytest.raises(ConfigError, match=path.name) as caught:
        read_rgb(str(path))
    facts = {"float": "floating point", "deep": "16 bits"}
    assert facts.get(kind, "replace or remove it") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_image_never_has_other_pixels(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    Image.fromarray(COLOURS).save(path, format=kind)
    whole, content = np.asarray(read_rgb(str(path))), path.read_bytes()
    num_refused = 0
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        try:
            assert np.array_equal(read_rgb(str(path)), whole)
        except ConfigError:
            num_refused += 1
    assert num_refused > len(content) // 7 - 5


def test_a_removed_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.png.*removed"):
        read_rgb(str(tmp_path / "gone.png"))


def test_an_image_above_the_limit_of_pillow_is_too_large(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "large.png"
    Image.fromarray(COLOURS).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(ConfigError, match=r"large\.png.*too large.*12 pixels.*10 pixels") as caught:
        read_rgb(str(path))
    assert "damaged" not in str(caught.value)


def test_an_error_of_the_library_without_a_text_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(ConfigError, match=r"a\.png: the image cannot be read \(RuntimeError\)"):
        read_rgb(str(tmp_path / "a.png"))
