"""Read an image file as RGB."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final

import numpy as np

from modelzoo_trainer.errors import ConfigError, reason_of

_EXTRA: Final = "pip install 'modelzoo-trainer[vision]'"
_DEEP: Final = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_DEEPEST: Final = 65535
_DROPPED_BITS: Final = 8


def pillow(name: str = "Image") -> Any:
    """Return a module of the library Pillow.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(f"PIL.{name}")
    except ImportError as error:
        raise ConfigError(lacking_pillow()[0]) from error


def lacking_pillow() -> list[str]:
    """Return a message if Pillow is not installed."""
    if find_spec("PIL") is not None:
        return []
    return [f"data_dir: reading images requires Pillow, which is not installed: {_EXTRA}"]


def read_rgb(path: str, data: bytes | None = None) -> Any:
    """Return an image of Pillow of the mode RGB.

    `data`: the content of the file, if it is in memory; then `path` is for messages only.

    Grey values become equal parts of red, green and blue; of 16 bits, the upper 8 are kept.
    Palettes, CMYK, YCbCr and Lab are converted by Pillow. Transparency, and how the camera was held
    (EXIF), have no effect, as in torchvision.

    Raises:
        ConfigError: With the path, if it is not an image, damaged, of another mode, or has more
            pixels than Pillow's limit.
    """
    module = pillow()
    try:
        with module.open(path if data is None else BytesIO(data)) as image:
            image.load()
            return _as_rgb(module, image)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: the image has been removed since the dataloader was created. Restore it, or "
            f"start the run again."
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"{path}: the image cannot be read: this user lacks permission. Change it."
        ) from error
    except (module.DecompressionBombError, module.DecompressionBombWarning) as error:
        num, _, _ = str(error).partition(",")
        raise ConfigError(
            f"{path}: the image is too large for Pillow ({num}). Shrink it, or remove it."
        ) from error
    except Exception as error:  # the library has no type of its own for a damaged file
        why = reason_of(error)
        raise ConfigError(
            f"{path}: the image cannot be read ({why}). It is damaged, truncated or not an "
            f"image: replace or remove it."
        ) from error


def _as_rgb(module: Any, image: Any) -> Any:
    if image.mode == "RGB":
        return image
    if image.mode in _DEEP:  # Pillow would clip at 255
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > _DEEPEST):
            raise ConfigError(
                f"the image has values from {values.min()} to {values.max()}, but at most 16 bits "
                f"are supported. Convert it to 8 bits."
            )
        return module.fromarray((values >> _DROPPED_BITS).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ConfigError(
            "the image has floating point values, whose range is not known. Convert it to 8 bits."
        )
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # else Pillow warns
    return image.convert("RGB")
