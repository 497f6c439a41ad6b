"""Transforms of images by name, with the parameters and formulas of torchvision.

https://pytorch.org/vision/stable/transforms.html

Before `to_tensor`, transforms get and return images of Pillow, of the mode RGB.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Le, MaxLen, MinLen, Predicate

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    NonNegativeFloat,
    Size,
    check,
)
from modelzoo_trainer.base.nested_settings import refuse_misspelt_name
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.data.images.colours import ColorJitter, GaussianBlur, Solarize
from modelzoo_trainer.zoo.data.images.decoding import pillow
from modelzoo_trainer.zoo.data.images.transform import Hw, Probability, Transform

SizeSetting = Size | Annotated[list[Size], MinLen(1), MaxLen(2)]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
Byte = Annotated[int, Ge(0), Le(255)]


def _is_range(values: list[float]) -> bool:
    return values[0] <= values[1]


Range = Annotated[
    list[Annotated[float, Ge(1e-9), Le(1e9)]],  # products with areas of images stay finite
    MinLen(2),
    MaxLen(2),
    Predicate(_is_range),
    "a list of two numbers from 1e-9 to 1e9, the smaller one first",
]
Channels = Annotated[list[NonNegativeFloat], MinLen(3), MaxLen(3)]
Deviations = Annotated[list[FinitePositiveFloat], MinLen(3), MaxLen(3)]

_TRIES: Final = 10  # of random_resized_crop, as in torchvision


def hw_of(size: int | Sequence[int]) -> Hw:
    """Return a size as height and width; one number is both."""
    values = [size] if isinstance(size, int) else list(size)
    return values[0], values[-1]


def _resized(image: Any, size: Hw, interpolation: str, box: Any = None) -> Any:
    """Return an image of another size, with antialiasing; `box`: (left, top, right, bottom)."""
    if image.size == (size[1], size[0]) and box is None:
        return image
    method = getattr(pillow().Resampling, interpolation.upper())
    return image.resize((size[1], size[0]), method, box=box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Transform):
    """Change the size.

    Args:
        size: Height and width, or the shorter side, which keeps the ratio.
        interpolation: How.
        max_size: Longer side at most, which needs `size` as one number.
        antialias: No effect: images are always antialiased.
    """

    size: SizeSetting
    interpolation: Interpolation = "bilinear"
    max_size: Size | None = None
    antialias: Flag | None = None

    def __post_init__(self) -> None:
        if self.max_size is not None and (self._side is None or self.max_size <= self._side):
            raise ConfigError(
                f"max_size is {self.max_size}, but requires size to be one smaller number, got "
                f"{self.size}. Change size, or remove max_size."
            )

    @property
    def _side(self) -> int | None:
        values = [self.size] if isinstance(self.size, int) else self.size
        return values[0] if len(values) == 1 else None

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image in the size."""
        width, height = image.size
        return _resized(image, self._target(height, width), self.interpolation)

    def _target(self, height: int, width: int) -> Hw:
        side = self._side
        if side is None:
            return hw_of(self.size)
        short, long = min(height, width), max(height, width)
        shorter, longer = side, int(side * long / short)
        if self.max_size is not None and longer > self.max_size:
            shorter, longer = int(self.max_size * shorter / longer), self.max_size
        shorter = max(shorter, 1)
        return (longer, shorter) if width <= height else (shorter, longer)

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size."""
        if self._side is None:
            return hw_of(self.size)
        return None if size is None else self._target(*size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCrop(Transform):
    """Cut out the centre; a smaller image gets a black border.

    Args:
        size: Height and width, or one number for both.
    """

    size: SizeSetting

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the centre."""
        height, width = hw_of(self.size)
        image = _at_least(image, height, width)
        top = round((image.height - height) / 2)
        left = round((image.width - width) / 2)
        return image.crop((left, top, left + width, top + height))

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size."""
        return hw_of(self.size)


def _at_least(image: Any, height: int, width: int) -> Any:
    """Return an image with a black border where it is smaller."""
    if image.width >= width and image.height >= height:
        return image
    whole = pillow().new("RGB", (max(image.width, width), max(image.height, height)))
    whole.paste(image, ((whole.width - image.width) // 2, (whole.height - image.height) // 2))
    return whole


def _with_border(image: Any, rows: int, columns: int) -> Any:
    """Return an image with black rows above and below, and columns on the left and the right."""
    if not rows and not columns:
        return image
    whole = pillow().new("RGB", (image.width + 2 * columns, image.height + 2 * rows))
    whole.paste(image, (columns, rows))
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCrop(Transform):
    """Cut out a random part.

    Args:
        size: Height and width, or one number for both.
        pad_if_needed: Whether an image that is smaller by n pixels gets a black border of n pixels
            on both sides, as in torchvision; otherwise it is refused.
    """

    size: SizeSetting
    pad_if_needed: Flag = False

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the part."""
        height, width = hw_of(self.size)
        if self.pad_if_needed:
            image = _with_border(image, max(height - image.height, 0), max(width - image.width, 0))
        if image.width < width or image.height < height:
            raise ConfigError(
                f"random_crop needs an image of {height} x {width}, got {image.height} x "
                f"{image.width}. Resize images before, or set pad_if_needed: true."
            )
        top = draw.randint(0, image.height - height)
        left = draw.randint(0, image.width - width)
        return image.crop((left, top, left + width, top + height))

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size."""
        return hw_of(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop(Transform):
    """Cut out a part of random area and ratio of sides, and resize it.

    Source: Szegedy et al. 2015, https://arxiv.org/abs/1409.4842, section 6. If ten tries give no
    part that is inside the image, the largest centre with a ratio in the range is cut out.

    Args:
        size: Height and width, or one number for both.
        scale: Range of the area, as a share of the image.
        ratio: Range of width / height, uniform in its logarithm.
        interpolation: How it is resized.
        antialias: No effect: images are always antialiased.
    """

    size: SizeSetting
    scale: Range = (0.08, 1.0)  # type: ignore[assignment]  # not changeable
    ratio: Range = (3 / 4, 4 / 3)  # type: ignore[assignment]
    interpolation: Interpolation = "bilinear"
    antialias: Flag | None = None

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the part."""
        left, top, width, height = self.part(image.width, image.height, draw)
        cut = image.crop((left, top, left + width, top + height))
        return _resized(cut, hw_of(self.size), self.interpolation)

    def part(self, width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
        """Return left, top, width and height of the part of an image of this size."""
        least, most = (math.log(one) for one in self.ratio)
        for _ in range(_TRIES):
            area = width * height * draw.uniform(*self.scale)
            ratio = math.exp(draw.uniform(least, most))
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                return draw.randint(0, width - wide), draw.randint(0, height - high), wide, high
        wide, high = width, height
        if width / height < self.ratio[0]:
            high = min(height, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            wide = min(width, round(height * self.ratio[1]))
        return (width - wide) // 2, (height - high) // 2, wide, high

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size."""
        return hw_of(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomHorizontalFlip(Transform):
    """Exchange left and right.

    Args:
        p: Probability.
    """

    p: Probability = 0.5

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or its mirror image."""
        if draw.random() >= self.p:
            return image
        return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomVerticalFlip(Transform):
    """Exchange top and bottom.

    Args:
        p: Probability.
    """

    p: Probability = 0.5

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or its mirror image."""
        if draw.random() >= self.p:
            return image
        return image.transpose(pillow().Transpose.FLIP_TOP_BOTTOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGrayscale(Transform):
    """Replace colours by grey values.

    Args:
        p: Probability.
    """

    p: Probability = 0.1

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the image, or its grey values."""
        return image.convert("L").convert("RGB") if draw.random() < self.p else image


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandToSquare(Transform):
    """Put the image into the middle of a square.

    Args:
        background_color: Red, green and blue of the border.
    """

    background_color: Annotated[list[Byte], MinLen(3), MaxLen(3)]

    def __call__(self, image: Any, draw: random.Random) -> Any:
        """Return the square."""
        side = max(image.size)
        if image.size == (side, side):
            return image
        whole = pillow().new("RGB", (side, side), tuple(self.background_color))
        whole.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return whole

    def size_after(self, size: Hw | None) -> Hw | None:
        """Return the size."""
        return None if size is None else (max(size), max(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTensor(Transform):
    """Convert to numbers from 0 to 1, float32, channels first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(Transform):
    """Compute (x - mean) / std for each channel; only after `to_tensor`.

    Args:
        mean: Of red, green and blue, from 0 to 1.
        std: Likewise.
        inplace: No effect.
    """

    mean: Channels
    std: Deviations
    inplace: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToDtype(Transform):
    """No effect: batches are float32, and the section `precision` decides what a model gets.

    Args:
        mp_type: No effect.
    """

    mp_type: Any = None


TRANSFORMS: Final[Mapping[str, type[Transform]]] = {
    "center_crop": CenterCrop,
    "color_jitter_with_prob": ColorJitter,
    "expand_to_square": ExpandToSquare,
    "normalize": Normalize,
    "random_crop": RandomCrop,
    "random_gaussian_blur_random_radius": GaussianBlur,
    "random_gray_scale": RandomGrayscale,
    "random_grayscale": RandomGrayscale,
    "random_horizontal_flip": RandomHorizontalFlip,
    "random_resized_crop": RandomResizedCrop,
    "random_solarize": Solarize,
    "random_vertical_flip": RandomVerticalFlip,
    "resize": Resize,
    "to_dtype": ToDtype,
    "to_tensor": ToTensor,
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Transforms of images, then of numbers.

    Args:
        images: Before `to_tensor`.
        numbers: After it.
    """

    images: tuple[Transform, ...]
    numbers: tuple[Normalize, ...]

    @property
    def size(self) -> Hw | None:
        """Size of the images, None if it depends on the files."""
        size: Hw | None = None
        for one in self.images:
            size = one.size_after(size)
        return size


def parse_transforms(given: Sequence[Any], where: str = "transforms") -> Pipeline:
    """Return the transforms that a setting names.

    Args:
        given: The setting: a mapping with `name` and arguments for each.
        where: Its place, for messages.

    Raises:
        ConfigError: If a name, an argument or the order is invalid.
    """
    found = [_transform(one, f"{where}[{number}]") for number, one in enumerate(given)]
    places = [number for number, one in enumerate(found) if isinstance(one, ToTensor)]
    if len(places) != 1:
        raise ConfigError(
            f"{where}: to_tensor must be there once, got it {len(places)} times. It follows the "
            f"transforms of images, and normalize follows it."
        )
    before, after = found[: places[0]], found[places[0] + 1 :]
    for number, one in enumerate(found):
        is_for_numbers = isinstance(one, Normalize)
        if not isinstance(one, ToTensor | ToDtype) and is_for_numbers != (number > places[0]):
            raise ConfigError(
                f"{where}[{number}]: {given[number]['name']} must be "
                f"{'after' if is_for_numbers else 'before'} to_tensor. Move it."
            )
    return Pipeline(
        tuple(one for one in before if not isinstance(one, ToDtype)),
        tuple(one for one in after if isinstance(one, Normalize)),
    )


def _named(given: object, where: str) -> Mapping[str, Any]:
    """Return the mapping of a transform, which has a name."""
    if isinstance(given, Mapping):
        refuse_misspelt_name(given, where)
        if isinstance(given.get("name"), str):
            return given
    raise ConfigError(
        f"{where}: expected a mapping with name and the arguments of a transform, got {given!r}. "
        f"Transforms: {', '.join(TRANSFORMS)}."
    )


def _transform(given: object, where: str) -> Transform:
    given = _named(given, where)
    name = given["name"].lower()
    cls: Callable[..., Transform] | None = TRANSFORMS.get(name)
    if cls is None:
        raise ConfigError(
            f"{where}: there is no transform {given['name']!r} in this package. "
            f"{suggest(name, TRANSFORMS)} Transforms: {', '.join(TRANSFORMS)}."
        )
    arguments = {key: value for key, value in given.items() if key != "name"}
    kinds = annotations_of(cls)
    known = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f"{where}.{key}: no such argument of {name}. {suggest(key, known)}")
        check(f"{where}.{key}", value, kinds[key])
    for key, one in known.items():
        if one.default is MISSING and key not in arguments:
            raise ConfigError(f"{where}: {name} requires {key}. Set it.")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None
