"""The data processor of diffusion models on latents of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    Fraction,
    HeightAndWidth,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.images.folders import ImageFiles, find_images, missing_folder
from modelzoo_trainer.zoo.data.images.latents import LATENTS, NoisyLatents
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_without_effect

_NO_EFFECT: Final = {
    "image_channels": "the images are encoded already",
    "image_size": "the images are encoded already",
    "noaugment": "latents are used as they are",
    "use_worker_cache": "files are read where they are",
    "mixed_precision": "the section precision decides what a model gets",
    "fp16_type": "the section precision decides what a model gets",
}


class DiffusionLatentImageNet1KProcessor(StreamProcessor):
    """Load batches of latents of images with their classes, noise and timesteps, for `dit`.

    Latents are `data_dir/split/CLASS/FILE.npz`, with `vae_output`, mean and log-variance as an
    autoencoder gives them, and `label`; without that, the label is the place of the folder among
    those of `train` by name. All that is random only depends on `shuffle_seed`, the epoch and the
    sample: not on workers, processes, the batch size of a worker, or where a run was resumed.

    Args:
        data_dir: The folder above `train` and `val`; with several, such as one of mirrored images,
            each sample is taken from one of them at random. An epoch has the samples of the
            largest.
        batch_size: Samples per batch over all processes, a multiple of their number.
        split: `train` or `val`.
        num_classes: Number of classes; null = that of the model.
        num_diffusion_steps: Timesteps are drawn from 0 to this - 1; null = that of the model.
        label_dropout_rate: Probability that a label is replaced by `num_classes`, the label of no
            class, in both splits; null = that of the model.
        latent_size: Height and width of the latents; null = that of the model.
        latent_channels: Channels of the latents; null = those of the model.
        vae_scaling_factor: Factor on the latents; null = that of the model.
        schedule_name: Must be that of the model; null = that.
        shuffle: Whether to shuffle `train`, each epoch in its own order; `val` is in order.
        shuffle_seed: Seed of the order and of all draws; default: 0.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        transforms: Must be null or empty: they are of images.
        var_loss: Must be false or null: variances are not predicted.
        image_channels: No effect.
        image_size: No effect.
        noaugment: No effect.
        use_worker_cache: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        A batch: input, diffusion_noise (B, channels, height, width), float32; label, timestep
        (B,), int32.

    Raises:
        ConfigError: If a folder or an argument is invalid, or differs from the model, or, while
            loading, with the path of a file that cannot be read or does not fit.
    """

    dataset: NoisyLatents

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        split: Literal["train", "val"] = "train",
        num_classes: Size | None = None,
        num_diffusion_steps: Size | None = None,
        label_dropout_rate: Fraction | None = None,
        latent_size: HeightAndWidth | None = None,
        latent_channels: Size | None = None,
        vae_scaling_factor: FinitePositiveFloat | None = None,
        schedule_name: Literal["linear"] | None = None,
        shuffle: Flag = True,
        shuffle_seed: ShuffleSeed | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag | None = True,
        transforms: list[dict[str, Any]] | None = None,
        var_loss: Flag | None = None,
        image_channels: Size | None = None,
        image_size: HeightAndWidth | None = None,
        noaugment: Flag = False,
        use_worker_cache: Flag = False,
        mixed_precision: Any = None,
        fp16_type: Any = None,
    ) -> None:
        _refuse({"transforms": transforms, "var_loss": var_loss})
        ignored = {
            "image_channels": image_channels,
            "image_size": image_size,
            "noaugment": noaugment,
            "use_worker_cache": use_worker_cache,
            "mixed_precision": mixed_precision,
            "fp16_type": fp16_type,
        }
        say_without_effect(type(self).__name__, ignored, _NO_EFFECT)
        seed = shuffle_seed or 0
        self.options = LoadingOptions(
            global_batch_size=batch_size,
            shuffle=shuffle and split == "train",
            shuffle_seed=seed,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=bool(persistent_workers),
        )
        given = {
            "num_classes": num_classes,
            "num_diffusion_steps": num_diffusion_steps,
            "label_dropout_rate": label_dropout_rate,
            "latent_size": latent_size,
            "latent_channels": latent_channels,
            "vae_scaling_factor": vae_scaling_factor,
            "schedule_name": schedule_name,
        }
        self.dataset = NoisyLatents(self.load(_folders(data_dir), split), given, seed)
        num = len(self.dataset)
        self.members = [Member(0, num, num)]

    @event("load")
    def load(self, data_dirs: list[str], split: str) -> list[ImageFiles]:
        """Return the files of a split in each folder."""
        return [find_images(one, split, LATENTS) for one in data_dirs]

    @classmethod
    def check_arguments(
        cls, *, data_dir: str | list[str], split: str = "train", **others: Any
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid.
        """
        _refuse(others)
        return [lack for one in _folders(data_dir) for lack in missing_folder(one, split, LATENTS)]


def _refuse(given: Mapping[str, Any]) -> None:
    if given.get("transforms"):
        raise ConfigError(
            "transforms: latents cannot be transformed as images are. Remove it, and encode "
            "transformed images, such as mirrored ones, into another folder of data_dir."
        )
    if given.get("var_loss"):
        raise ConfigError(
            "var_loss is true, which is not supported: variances are not predicted. Set "
            "var_loss: false."
        )


def _folders(data_dir: str | list[str]) -> list[str]:
    folders = [data_dir] if isinstance(data_dir, str) else list(data_dir)
    if not folders or not all(isinstance(one, str) and one for one in folders):
        raise ConfigError(
            f"data_dir: expected a folder with train and val in it, or a list of such folders, "
            f"got {data_dir!r}."
        )
    return folders
