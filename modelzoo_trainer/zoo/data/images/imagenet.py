"""Images with classes, in the layout of ImageNet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from modelzoo_trainer.base.constraints import (
    Flag,
    HeightAndWidth,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
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
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import StreamProcessor, say_once, say_without_effect

_NO_EFFECT: Final = {
    "use_worker_cache": "files are read where they are",
    "mixup_alpha": "images are not mixed, as in the Cerebras Model Zoo",
    "cutmix_alpha": "images are not mixed, as in the Cerebras Model Zoo",
    "ra_sampler_num_repeat": "no sample is repeated in an epoch",
    "mixed_precision": "the section precision decides what a model gets",
    "fp16_type": "the section precision decides what a model gets",
}


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


class ImageNet1KProcessor(StreamProcessor):
    """Load batches of images and their classes from a folder for each class.

    Images are `data_dir/split/CLASS/IMAGE`; label i is the i-th class of `train` by name, for both
    splits; without that folder, of the split itself. Random transforms only depend on
    `shuffle_seed`, the epoch and the image: not on workers, processes, the batch size of a worker,
    or where a run was resumed.

    Args:
        data_dir: The folder above `train` and `val`.
        batch_size: Images per batch over all processes, a multiple of their number.
        image_size: Height and width of the images after the transforms.
        split: `train` or `val`.
        transforms: Changes to images, a list of `{name, ...arguments}`: see the documentation of
            data processors. Required without `noaugment`.
        noaugment: Whether images are only resized to `image_size`, in place of `transforms`.
        num_classes: Classes at most; null = those of the model.
        shuffle: Whether to shuffle `train`, each epoch in its own order; `val` is in order.
        shuffle_seed: Seed of the order and of random transforms; default: 0.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no image is lost.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        sampler: `random`; `repeated-aug` is not supported.
        ra_sampler_num_repeat: No effect.
        mixup_alpha: No effect.
        cutmix_alpha: No effect.
        use_worker_cache: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        images: (B, 3, height, width), float32. labels: (B,), int32.

    Raises:
        ConfigError: If a folder, a transform or another argument is invalid, or, while loading,
            with the path of an image that cannot be read.
    """

    @checked()
    def __init__(
        self,
        *,
        data_dir: str | list[str],
        batch_size: PositiveInt,
        image_size: HeightAndWidth | None = None,
        split: Literal["train", "val"] = "train",
        transforms: list[dict[str, Any]] | None = None,
        noaugment: Flag = False,
        num_classes: Size | None = None,
        shuffle: Flag = True,
        shuffle_seed: ShuffleSeed | None = None,
        num_workers: NonNegativeSize = 0,
        drop_last: Flag = True,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag | None = True,
        sampler: str = "random",
        ra_sampler_num_repeat: int | None = None,
        mixup_alpha: float | None = None,
        cutmix_alpha: float | None = None,
        use_worker_cache: Flag = False,
        mixed_precision: Any = None,
        fp16_type: Any = None,
    ) -> None:
        size, self._pipeline = _checked(
            {"image_size": image_size, "transforms": transforms, "noaugment": noaugment}
        )
        _check_sampler(sampler)
        owner = type(self).__name__
        ignored = {
            "use_worker_cache": use_worker_cache,
            "mixup_alpha": mixup_alpha or None,  # 0 is off
            "cutmix_alpha": cutmix_alpha or None,
            "ra_sampler_num_repeat": ra_sampler_num_repeat,
            "mixed_precision": mixed_precision,
            "fp16_type": fp16_type,
        }
        say_without_effect(owner, ignored, _NO_EFFECT)
        if noaugment and transforms:
            say_once(f"{owner}.transforms has no effect with noaugment.")
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
        pillow()
        files = self.load(_folder(data_dir), split)
        if num_classes is not None:
            check_classes(files, num_classes, f"num_classes is {num_classes}")
        self.dataset = ClassImages(files, self._pipeline, size, seed)
        self.members = [Member(0, len(files), len(files))]

    @event("load")
    def load(self, data_dir: str, split: str) -> ImageFiles:
        """Return the images of a split."""
        return find_images(data_dir, split)

    @classmethod
    def check_arguments(
        cls,
        *,
        data_dir: str | list[str],
        split: str = "train",
        sampler: str = "random",
        **others: Any,
    ) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid, or arguments do not fit each other.
        """
        _checked(others)
        _check_sampler(sampler)
        return lacking_pillow() + missing_folder(_folder(data_dir), split)


def check_classes(files: ImageFiles, num: int, what: str) -> None:
    """Check that there are no more classes than `num`.

    Raises:
        ConfigError: If there are; `what` says where the number is from.
    """
    if len(files.classes) > num:
        raise ConfigError(
            f"{what}, but the labels of {files.folder} are those of {len(files.classes)} folders "
            f"of classes. Increase num_classes, or remove folders that are no classes."
        )


def _checked(given: Mapping[str, Any]) -> tuple[Hw, Pipeline]:
    """Return the size of images and their transforms.

    Raises:
        ConfigError: If they do not fit each other.
    """
    height, width = given.get("image_size") or (224, 224)
    transforms: Sequence[Any] | None = given.get("transforms")
    if given.get("noaugment"):
        transforms = [{"name": "resize", "size": [height, width]}, {"name": "to_tensor"}]
    if transforms is None:
        raise ConfigError(
            "transforms: missing; without noaugment: true, the images require them. Set it, such "
            "as [{name: resize, size: [224, 224]}, {name: to_tensor}]."
        )
    pipeline = parse_transforms(transforms)
    size = pipeline.size
    if size is not None and size != (height, width):
        raise ConfigError(
            f"image_size is {[height, width]}, but images have {list(size)} pixels after the "
            f"transforms. Set both to the image_size of the model."
        )
    return (height, width), pipeline


def _check_sampler(sampler: str) -> None:
    if sampler != "random":
        raise ConfigError(
            f"sampler is {sampler!r}, but only random is supported. Remove it: images are then in "
            f"a random order with shuffle: true."
        )


def _folder(data_dir: str | list[str]) -> str:
    folders = [data_dir] if isinstance(data_dir, str) else data_dir
    if len(folders) != 1 or not isinstance(folders[0], str) or not folders[0]:
        raise ConfigError(
            f"data_dir: expected one folder, with train and val in it, got {data_dir!r}."
        )
    return folders[0]
