"""Latents of images, as an autoencoder has written them, with noise for a diffusion model.

Dimension letters: B batch, C channels of the latents.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.zoo.data.images.folders import FileKind, ImageFiles

LATENTS: Final = FileKind("a file of latents", "files of latents", "FILE.npz", (".npz",))
_MOMENTS, _LABEL = "vae_output", "label"
_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE = -30.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSettings:
    """What batches are made with; the defaults are the same as in the model `dit`.

    Args:
        num_classes: Number of classes, and the label of no class.
        latent_size: Height and width.
        latent_channels: C.
        vae_scaling_factor: Factor on the latents.
        label_dropout_rate: Probability that a label is replaced by the label of no class.
        num_diffusion_steps: Number of timesteps.
        schedule_name: Of the noise, which the model adds.
    """

    num_classes: int = 1000
    latent_size: Sequence[int] = field(default=(32, 32))
    latent_channels: int = 4
    vae_scaling_factor: float = 0.18215
    label_dropout_rate: float = 0.1
    num_diffusion_steps: int = 1000
    schedule_name: str = "linear"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a latent: (C, height, width)."""
        height, width = self.latent_size
        return self.latent_channels, height, width


def settings_for(given: Mapping[str, Any], model: Any = None) -> LatentSettings:
    """Return the settings that are given, those that are None as the model has them.

    Raises:
        ConfigError: If the model has another value than the one that is given.
    """
    found = {}
    for one in fields(LatentSettings):
        own, of_model = given.get(one.name), getattr(model, one.name, None)
        if own is not None and of_model is not None and _plain(own) != _plain(of_model):
            raise ConfigError(
                f"{one.name} is {own} in the data processor, but {of_model} in the model. Remove "
                f"it from the data processor, which then takes the model's."
            )
        value = of_model if own is None else own
        if value is not None:
            found[one.name] = value
    return LatentSettings(**found)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


class NoisyLatents(BatchDataset):
    """A dataset of batches of latents, with classes, timesteps and noise.

    What is drawn only depends on the seed, the epoch and the sample: the folder that it is taken
    from, whether its label is dropped, its timestep, the latent among those that the autoencoder
    gives for the image, and the noise.

    Args:
        folders: The files of each folder; sample i is file i of one of them, modulo its length.
        given: Fields of `LatentSettings`; None = as the model has it.
        seed: Of the draws.

    Shapes:
        A batch: input, diffusion_noise (B, C, height, width), float32; label, timestep (B,), int32.
    """

    def __init__(self, folders: Sequence[ImageFiles], given: Mapping[str, Any], seed: int) -> None:
        self.folders = tuple(folders)
        self.settings = settings_for(given)
        self._given = dict(given)
        self._seed = seed
        self._epoch = 0
        self._check_same_classes()
        if given.get("num_classes") is not None:
            self._check_classes(self.settings.num_classes)

    @property
    def fingerprint(self) -> int:
        """A number that changes with the names of classes and files."""
        return zlib.crc32(repr([one.fingerprint for one in self.folders]).encode())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self._epoch = epoch

    def follow_model(self, model: Any) -> None:
        """Take the settings that are not given from a model, and check the others against it.

        Raises:
            ConfigError: If they differ, or there are more classes than the model has.
        """
        self.settings = settings_for(self._given, model)
        if type(getattr(model, "num_classes", None)) is int:
            self._check_classes(self.settings.num_classes)

    def __len__(self) -> int:
        return max(len(files) for files in self.folders)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample.

        Raises:
            IndexError: If there is no sample of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        batch = self.__getitems__([index % len(self)])
        return {name: value[0] for name, value in batch.items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of these samples.

        Raises:
            ConfigError: With the path of a file that cannot be read or does not fit.
        """
        used, num = self.settings, len(indices)
        channels, *size = used.shape
        moments = np.empty((num, 2 * channels, *size), np.float32)
        draws = torch.empty((2, num, channels, *size))
        labels, timesteps = np.empty(num, np.int32), np.empty(num, np.int32)
        generator = torch.Generator()
        for row, index in enumerate(indices):
            generator.manual_seed(mixed_seed(self._seed, self._epoch, index))
            which = int(torch.randint(len(self.folders), (), generator=generator))
            is_dropped = float(torch.rand((), generator=generator)) < used.label_dropout_rate
            timesteps[row] = int(torch.randint(used.num_diffusion_steps, (), generator=generator))
            draws[:, row] = torch.randn((2, channels, *size), generator=generator)
            moments[row], label = self._read(which, index)
            labels[row] = used.num_classes if is_dropped else label
        latents = sampled(torch.from_numpy(moments), draws[0]) * used.vae_scaling_factor
        return {
            "input": latents,
            "label": torch.from_numpy(labels),
            "diffusion_noise": draws[1],
            "timestep": torch.from_numpy(timesteps),
        }

    def _read(self, which: int, index: int) -> tuple[NDArray[np.floating[Any]], int]:
        """Return mean and log-variance, and the label, of a file."""
        files = self.folders[which]
        place = index % len(files)
        path, of_folder = files.path(place), int(files.labels[place])
        moments, label = read_latents(path)
        channels, *size = self.settings.shape
        if moments.shape != (2 * channels, *size):
            raise ConfigError(
                f"{path}: {_MOMENTS} has the shape {moments.shape}, but {(2 * channels, *size)} is "
                f"required: mean and log-variance of latent_channels ({channels}) and latent_size "
                f"({list(size)}). Set these in the model to the values of the data, or encode the "
                f"images again."
            )
        if not np.isfinite(moments).all():
            raise ConfigError(f"{path}: {_MOMENTS} has NaN or infinity. Encode the image again.")
        if label is None:
            return moments, of_folder
        num = self.settings.num_classes
        if not 0 <= label < num:
            raise ConfigError(
                f"{path}: label is {label}, but num_classes is {num}: labels are 0 to {num - 1}. "
                f"Increase num_classes of the model and the data processor, or correct the file."
            )
        if len(files.classes) == num and label != of_folder:
            raise ConfigError(
                f"{path}: label is {label}, but its folder is class {of_folder} of all {num} by "
                f"name. Move the file to the folder of its class, or encode the image again."
            )
        return moments, label

    def _check_same_classes(self) -> None:
        first = self.folders[0]
        for other in self.folders[1:]:
            if other.classes != first.classes:
                lacking = sorted({*first.classes} ^ {*other.classes})
                raise ConfigError(
                    f"data_dir: {first.folder!r} and {other.folder!r} have different classes; only "
                    f"one of them has {lacking[0]!r}. Use the same folders of classes in all."
                )

    def _check_classes(self, num: int) -> None:
        files = self.folders[0]
        if len(files.classes) > num:
            raise ConfigError(
                f"num_classes is {num}, but {files.folder} has {len(files.classes)} folders of "
                f"classes. Increase it in the model and the data processor, or remove folders "
                f"that are no classes."
            )


def sampled(moments: Tensor, draws: Tensor) -> Tensor:
    """Return latents drawn from the normal distributions that an autoencoder gives.

    The log-variance is limited to -30 to 20.

    Source: Kingma and Welling 2013, https://arxiv.org/abs/1312.6114, section 2.4; the limits as in
    the autoencoder of Rombach et al. 2021, https://arxiv.org/abs/2112.10752.

    Shapes:
        moments: (B, 2 * C, height, width), mean, then log-variance. draws, of a standard normal
        distribution: (B, C, height, width). Returns: as draws.
    """
    mean, log_variance = moments.chunk(2, dim=1)
    log_variance = log_variance.clamp(_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE)
    return mean + (0.5 * log_variance).exp() * draws


def read_latents(path: str) -> tuple[NDArray[np.floating[Any]], int | None]:
    """Return `vae_output` of a file, and its `label`, None if it has none.

    Raises:
        ConfigError: With the path, if the file is damaged or lacks it, or it is of another type.
    """
    moments, label = _arrays(path)
    if not np.issubdtype(moments.dtype, np.floating):
        raise ConfigError(
            f"{path}: {_MOMENTS} is of the type {moments.dtype}, but must be floating point. Write "
            f"the output of the autoencoder without rounding it to integers."
        )
    if label is None:
        return moments, None
    if label.size != 1 or not np.issubdtype(label.dtype, np.integer):
        raise ConfigError(
            f"{path}: {_LABEL} has the shape {label.shape} and the type {label.dtype}, but must be "
            f"one integer. Write the number of the class."
        )
    return moments, int(label.reshape(()))


def _arrays(path: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    try:
        with Path(path).open("rb") as file:  # numpy leaves a damaged archive open
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ConfigError(
                    f"{path}: the file has one array, but must be an npz archive. Write it with "
                    f"numpy.savez."
                )
            if _MOMENTS not in archive.files:
                raise ConfigError(
                    f"{path}: the file has no {_MOMENTS!r}, but only {sorted(archive.files)}. "
                    f"Write mean and log-variance of the latent under that name."
                )
            return archive[_MOMENTS], archive[_LABEL] if _LABEL in archive.files else None
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: the file has been removed since the dataloader was created. Restore it, or "
            f"start the run again."
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"{path}: the file cannot be read: this user lacks permission. Change it."
        ) from error
    except Exception as error:  # numpy has no type of its own for a damaged file
        raise ConfigError(
            f"{path}: the file cannot be read ({reason_of(error)}). It is damaged, truncated or no "
            f"npz archive: replace or remove it."
        ) from error
