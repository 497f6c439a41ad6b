"""Folders with images of classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zoo.data.images.written import write_images


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Write images of classes; return the folder for `data_dir`."""

    def make(num_classes: int = 3, num_images: int = 4, size: tuple[int, int] = (12, 8)) -> Path:
        for split in ("train", "val"):
            write_images(tmp_path / "data" / split, num_classes, num_images, size)
        return tmp_path / "data"

    return make
