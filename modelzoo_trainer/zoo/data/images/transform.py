"""The base class of transforms of images."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.base.constraints import UnitInterval

Hw = tuple[int, int]
"""Height and width, in pixels."""
Probability = UnitInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A transform of images; by default one that changes no sizes."""

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the changed image."""
        raise NotImplementedError

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size of its images, None if that depends on the image.

        `size`: of the images that it gets.
        """
        return size
