"""The data processor of diffusion models on latents of images."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    Fraction,
    HeightAndWidth,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.images.folders import ImageFiles, find_images, missing_folder
from modelzoo_trainer.zoo.data.images.latents import LATENTS, NoisyLatents, settings_for
from modelzoo_trainer.zoo.data.sample_features import Feature, Features
from modelzoo_trainer.zoo.data.stream_processor import (
    PrecisionArguments,
    StreamProcessor,
    say_without_effect,
)

_ENCODED: Final = "the images are encoded already"
_OF_THE_MODEL: Final = (
    *("num_classes", "num_diffusion_steps", "label_dropout_rate", "latent_size"),
    *("latent_channels", "vae_scaling_factor", "schedule_name"),
)


@checked_dataclass(kw_only=True)
class DiffusionLatentImageNet1KProcessor(PrecisionArguments, StreamProcessor):
    """Load batches of latents of images with their classes, noise and timesteps, for `dit`.

    Latents are `data_dir/split/CLASS/FILE.npz`, with `vae_output`, mean and log-variance as an
    autoencoder gives them, and `label`; without that, the label is the place of the folder among
    the folders of `train` by name. All that is random only depends on `shuffle_seed`, the epoch and
    the sample: not on workers, processes, the batch size of a worker, or where a run was resumed.

    Args:
        shuffle: Whether to shuffle `train`, each epoch in its own order; `val` is in order.
        shuffle_seed: Seed of the order and of all draws; default: 0.
        data_dir: The folder above `train` and `val`; with several, such as one of mirrored images,
            each sample is taken from one of them at random. An epoch has the samples of the
            largest.
        split: `train` or `val`.
        num_classes: Number of classes; null = the model's.
        num_diffusion_steps: Timesteps are drawn from 0 to this - 1; null = the model's.
        label_dropout_rate: Probability that a label is replaced by `num_classes`, the label of no
            class, in both splits; null = the model's.
        latent_size: Height and width of the latents; null = the model's.
        latent_channels: Channels of the latents; null = the model's.
        vae_scaling_factor: Factor on the latents; null = the model's.
        schedule_name: Must be the model's; null = that.
        transforms: Must be null or empty: they are of images.
        var_loss: Must be false or null: variances are not predicted.

    Shapes:
        A batch: input, diffusion_noise (B, channels, height, width), float32; label, timestep
        (B,), int32.

    Raises:
        ConfigError: If a folder or an argument is invalid, or differs from the model, or, while
            loading, with the path of a file that cannot be read or does not fit.
    """

    data_dir: str | list[str]
    split: Literal["train", "val"] = "train"
    num_classes: Size | None = None
    num_diffusion_steps: Size | None = None
    label_dropout_rate: Fraction | None = None
    latent_size: HeightAndWidth | None = None
    latent_channels: Size | None = None
    vae_scaling_factor: FinitePositiveFloat | None = None
    schedule_name: Literal["linear"] | None = None
    transforms: list[dict[str, Any]] | None = None
    var_loss: Flag | None = None
    image_channels: Size | None = without_effect(_ENCODED)
    image_size: HeightAndWidth | None = without_effect(_ENCODED)
    noaugment: Flag = without_effect("latents are used as they are", default=False)
    use_worker_cache: Flag = without_effect("files are read where they are", default=False)

    def __post_init__(self) -> None:
        self._refuse()
        say_without_effect(self)
        self.options = self.loading_options(may_shuffle=self.split == "train")
        given = {name: getattr(self, name) for name in _OF_THE_MODEL}
        files = self.load(_folders(self.data_dir), self.split)
        self.dataset = NoisyLatents(files, given, self.options.shuffle_seed)
        num = len(self.dataset)
        self.members = [Member(0, num, num)]

    @event("load")
    def load(self, data_dirs: list[str], split: str) -> list[ImageFiles]:
        """Return the files of a split in each folder."""
        return [find_images(one, split, LATENTS) for one in data_dirs]

    @override
    def sample_features(self, model: Any) -> Features:
        given = {name: getattr(self, name) for name in _OF_THE_MODEL}
        shape = settings_for(given, model).shape
        found = {name: Feature(shape, torch.float32) for name in ("input", "diffusion_noise")}
        return found | {"label": Feature(()), "timestep": Feature(())}

    @override
    def missing(self) -> list[str]:
        self._refuse()
        return [
            lack
            for one in _folders(self.data_dir)
            for lack in missing_folder(one, self.split, LATENTS)
        ]

    def _refuse(self) -> None:
        if self.transforms:
            raise ConfigError(
                "transforms: latents cannot be transformed as images are. Remove it, and encode "
                "transformed images, such as mirrored ones, into another folder of data_dir."
            )
        if self.var_loss:
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
