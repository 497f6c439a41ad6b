"""Published diffusion models and their latents, scaled down.

The rule, besides that of `published_scaling.py`:

| setting | becomes |
|---|---|
| `latent_size`, also in `vae` | 8 x 8; `patch_size` stays |
| `num_classes` | at most 8 |
| folders of data | as many as before, each with latents of its own |
| data | a pattern for each class, with noise, as mean; a small variance |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

Plain = dict[str, Any]

_SIZE, _CHANNELS, _CLASSES = 8, 4, 8
_LOG_VARIANCE: Final = -6


def has_latents(section: Plain) -> bool:
    """Return whether a `model` or a dataloader is one of diffusion on latents."""
    names = (section.get("name"), section.get("data_processor"))
    return "dit" in names or "DiffusionLatentImageNet1KProcessor" in names


def scale_latents(section: Plain) -> None:
    """Scale sizes of latents and classes of a `model` or a dataloader in place."""
    for one in (section, section.get("vae") or {}):
        if one.get("latent_size"):
            one["latent_size"] = [_SIZE, _SIZE]
    if section.get("num_classes"):
        section["num_classes"] = min(section["num_classes"], _CLASSES)


def folders_of(loader: Plain, folder: Path) -> list[str]:
    """Return new folders, as many as a published dataloader has."""
    given = loader["data_dir"]
    num = 1 if isinstance(given, str) else len(given)
    return [str(folder / str(number)) for number in range(num)]


def write_latents(folder: Path, num: int, number: int) -> None:
    """Write `num` latents for each split, in the folders of all classes; `number`: the seed."""
    patterns = np.random.default_rng(0).standard_normal((_CLASSES, _CHANNELS, _SIZE, _SIZE)) * 5
    draw = np.random.default_rng(number)
    for split in ("train", "val"):
        for place in range(num):
            label = place % _CLASSES
            path = folder / split / f"n{label:08}" / f"{place:05}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            mean = patterns[label] + draw.standard_normal(patterns[label].shape)
            values = np.concatenate((mean, np.full_like(mean, _LOG_VARIANCE)))
            np.savez(path, vae_output=values.astype(np.float32), label=label, dest_path=str(path))
