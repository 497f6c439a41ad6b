"""Images with classes, in the layout of ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import (
    Flag,
    HeightAndWidth,
    Size,
    checked_dataclass,
    without_effect,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.images.decoding import lacking_pillow, pillow
from modelzoo_trainer.zoo.data.images.folders import ImageFiles, find_images, missing_folder
from modelzoo_trainer.zoo.data.images.reading import ImageReader
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.data.images.transforms import Pipeline, parse_transforms
from modelzoo_trainer.zoo.data.sample_features import Feature, Features
from modelzoo_trainer.zoo.data.stream_processor import (
    PrecisionArguments,
    StreamProcessor,
    say_once,
    say_without_effect,
)

NUM_CHANNELS: Final = 3
_NOT_MIXED: Final = "images are not mixed, as in the Cerebras Model Zoo"


class ClassImages(BatchDataset):
    """A dataset of batches `(images, labels)`.

    Args:
        files: The images.
        pipeline: Their transforms.
        size: Height and width after them.
        seed: Of random transforms, which depend on it, the epoch and the image alone.
    """

    def __init__(self, files: ImageFiles, pipeline: Pipeline, size: Hw, seed: int) -> None:
        self.files = files
        self.reader = ImageReader(pipeline, size, "image_size", seed)

    @property
    def fingerprint(self) -> int:
        """A number that changes with the names of classes and images."""
        return self.files.fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self.reader.epoch = epoch

    def follow_model(self, model: Any) -> None:
        """Check that a model has all classes.

        Raises:
            ConfigError: If it has fewer.
        """
        num = getattr(model, "num_classes", None)
        if type(num) is int:
            check_classes(self.files, num, f"the model's num_classes is {num}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its label.

        Raises:
            IndexError: If there is no image of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        images, labels = self.__getitems__([index % len(self)])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of these images.

        Raises:
            ConfigError: With the path of an image that cannot be read or has another size.
        """
        pixels = self.reader.empty(len(indices))
        for row, index in enumerate(indices):
            pixels[row] = self.reader.read(self.files.path(index), index)
        labels = torch.from_numpy(self.files.labels[np.asarray(indices)])
        return self.reader.numbers(pixels), labels


@checked_dataclass(kw_only=True)
class ImageNet1KProcessor(PrecisionArguments, StreamProcessor):
    """Load batches of images and their classes from a folder for each class.

    Images are `data_dir/split/CLASS/IMAGE`; label i is the i-th class of `train` by name, for both
    splits; without that folder, of the split itself. Random transforms only depend on
    `shuffle_seed`, the epoch and the image: not on workers, processes, the batch size of a worker,
    or where a run was resumed.

    Args:
        batch_size: Images per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle `train`, each epoch in its own order; `val` is in order.
        shuffle_seed: Seed of the order and of random transforms; default: 0.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no image is lost.
        data_dir: The folder above `train` and `val`.
        image_size: Height and width of the images after the transforms.
        split: `train` or `val`.
        transforms: Changes to images, a list of `{name, ...arguments}`: see the documentation of
            data processors. Required without `noaugment`.
        noaugment: Whether images are only resized to `image_size`, in place of `transforms`.
        num_classes: Classes at most; null = the model's.
        sampler: `random`; `repeated-aug` is not supported.

    Shapes:
        images: (B, 3, height, width), float32. labels: (B,), int32.

    Raises:
        ConfigError: If a folder, a transform or another argument is invalid, or, while loading,
            with the path of an image that cannot be read.
    """

    data_dir: str | list[str]
    image_size: HeightAndWidth | None = None
    split: Literal["train", "val"] = "train"
    transforms: list[dict[str, Any]] | None = None
    noaugment: Flag = False
    num_classes: Size | None = None
    sampler: str = "random"
    ra_sampler_num_repeat: int | None = without_effect("no sample is repeated in an epoch")
    mixup_alpha: float | None = without_effect(_NOT_MIXED)
    cutmix_alpha: float | None = without_effect(_NOT_MIXED)
    use_worker_cache: Flag = without_effect("files are read where they are", default=False)

    def __post_init__(self) -> None:
        size, self._pipeline = self._checked()
        say_without_effect(self)
        if self.noaugment and self.transforms:
            say_once(f"{type(self).__name__}.transforms has no effect with noaugment.")
        self.options = self.loading_options(may_shuffle=self.split == "train")
        pillow()
        files, num = self.load(_folder(self.data_dir), self.split), self.num_classes
        if num is not None:
            check_classes(files, num, f"num_classes is {num}")
        self.dataset = ClassImages(files, self._pipeline, size, self.options.shuffle_seed)
        self.members = [Member(0, len(files), len(files))]

    @event("load")
    def load(self, data_dir: str, split: str) -> ImageFiles:
        """Return the images of a split."""
        return find_images(data_dir, split)

    @override
    def sample_features(self, model: Any) -> Features:
        size, _ = self._checked()
        return Feature((NUM_CHANNELS, *size), torch.float32), Feature(())

    @override
    def missing(self) -> list[str]:
        self._checked()
        return lacking_pillow() + missing_folder(_folder(self.data_dir), self.split)

    def _checked(self) -> tuple[Hw, Pipeline]:
        """Return the size of images and their transforms.

        Raises:
            ConfigError: If they do not fit each other, or the sampler is not supported.
        """
        height, width = self.image_size or (224, 224)
        transforms: Sequence[Any] | None = self.transforms
        if self.noaugment:
            transforms = [{"name": "resize", "size": [height, width]}, {"name": "to_tensor"}]
        if transforms is None:
            raise ConfigError(
                "transforms: missing; without noaugment: true, the images require them. Set it, "
                "such as [{name: resize, size: [224, 224]}, {name: to_tensor}]."
            )
        pipeline = parse_transforms(transforms)
        size = pipeline.size
        if size is not None and size != (height, width):
            raise ConfigError(
                f"image_size is {[height, width]}, but images have {list(size)} pixels after the "
                f"transforms. Set both to the image_size of the model."
            )
        if self.sampler != "random":
            raise ConfigError(
                f"sampler is {self.sampler!r}, but only random is supported. Remove it: images are "
                f"then in a random order with shuffle: true."
            )
        return (height, width), pipeline


def check_classes(files: ImageFiles, num: int, what: str) -> None:
    """Check that there are no more classes than `num`.

    Raises:
        ConfigError: If there are; `what` says where the number is from.
    """
    if len(files.classes) > num:
        raise ConfigError(
            f"{what}, but the labels of {files.folder} come from {len(files.classes)} folders "
            f"of classes. Increase num_classes, or remove folders that are no classes."
        )


def _folder(data_dir: str | list[str]) -> str:
    folders = [data_dir] if isinstance(data_dir, str) else data_dir
    if len(folders) != 1 or not isinstance(folders[0], str) or not folders[0]:
        raise ConfigError(
            f"data_dir: expected one folder, with train and val in it, got {data_dir!r}."
        )
    return folders[0]
