"""Images for self-supervised pretraining: several crops of each, and masks of patches."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Flag, Size, checked_dataclass
from modelzoo_trainer.base.nested_settings import made
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.seeded_sampler import mixed_seed
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.images.block_masks import BlockMasks
from modelzoo_trainer.zoo.data.images.decoding import lacking_pillow, pillow, read_rgb
from modelzoo_trainer.zoo.data.images.folders import IMAGES, ImageFiles, find_images, missing_folder
from modelzoo_trainer.zoo.data.images.imagenet import NUM_CHANNELS
from modelzoo_trainer.zoo.data.images.multi_crop import LIST, CropSettings, stacked
from modelzoo_trainer.zoo.data.sample_features import Feature, Features
from modelzoo_trainer.zoo.data.stream_processor import (
    PrecisionArguments,
    StreamProcessor,
    say_without_effect,
)

_DATASET: Final = "Imagenet"
_TRANSFORM: Final = "Dinov2Transform"
_CROPS: Final = "multi_crop_transform"
_MASKS: Final = "masked_patch_transform"
_KIND: Final = replace(IMAGES, setting="dataset.root")
_OF_MASKS: Final = 1  # distinguishes seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    name: str
    root: str
    split: Literal["train", "val"] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transform:
    name: str
    multi_crop_transform: dict[str, Any]
    masked_patch_transform: dict[str, Any] | None = None


class ImageViews(BatchDataset):
    """A dataset of batches of crops and masks.

    Args:
        files: The images.
        crops: Settings of their crops.
        masks: Which patches of global crops are masked; None = batches have no masks.
        batch_size: Images per batch over all processes.
        seed: Of all random numbers. Crops depend on it, the epoch, the image and its place in the
            epoch, so that an image that is repeated has other ones; masks on it, the epoch, the
            place, and the batch size.
    """

    def __init__(
        self,
        files: ImageFiles,
        crops: CropSettings,
        masks: BlockMasks | None,
        batch_size: int,
        seed: int,
    ) -> None:
        self.files = files
        self._masks = masks
        self._crops = crops.crops(LIST)
        self._num_global = crops.global_num_crops
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._position: int | None = None

    @property
    def fingerprint(self) -> int:
        """A number that changes with the names of classes and images."""
        return self.files.fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self._epoch = epoch

    def set_position(self, position: int) -> None:
        """Set how many images of the epoch, over all processes, are before the next batch."""
        self._position = position

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the crops, the masks and the label of an image.

        Raises:
            IndexError: If there is no image of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {key: one[0] for key, one in self.__getitems__([index % len(self)]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of these images.

        Raises:
            ConfigError: With the path of an image that cannot be read.
        """
        num = self._num_global
        position, self._position = self._position, None
        images = [
            self._cropped(index, None if position is None else position + row)
            for row, index in enumerate(indices)
        ]
        batch = {"global_view": stacked([own[:num] for own in images], self._crops[:num])}
        if len(self._crops) > num:
            batch["local_view"] = stacked([own[num:] for own in images], self._crops[num:])
        batch["labels"] = torch.from_numpy(self.files.labels[np.asarray(indices)])
        if self._masks is not None:
            batch["collated_masks"] = self._masked(self._masks, indices, position)
        return batch

    def _cropped(self, index: int, place: int | None) -> list[Any]:
        """Return the crops of an image; `place`: in the epoch, None = not loaded by a trainer."""
        path = self.files.path(index)
        image = read_rgb(path)
        places = () if place is None else (place,)
        draw = random.Random(mixed_seed(self._seed, self._epoch, index, *places))
        try:
            return [crop(image, draw) for crop in self._crops]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def _masked(self, masks: BlockMasks, indices: list[int], position: int | None) -> Tensor:
        """Return the masks of a batch, or of the part of it that this process loads."""
        if position is None:  # not loaded by a trainer: the images tell batches apart
            position = -(1 + indices[0]) * self._batch_size
        num, seed = self._num_global, mixed_seed(self._seed, self._epoch, _OF_MASKS)
        found = np.empty((len(indices), num, masks.side**2), np.bool_)
        ratios: dict[int, Any] = {}
        for row in range(len(indices)):
            batch, place = divmod(position + row, self._batch_size)
            if batch not in ratios:
                ratios[batch] = masks.ratios(self._batch_size * num, mixed_seed(seed, batch))
            for view in range(num):
                slot = place * num + view
                least, most = ratios[batch][slot].tolist()
                draw = random.Random(mixed_seed(seed, batch, slot))
                found[row, view] = masks.mask(least, most, draw)
        return torch.from_numpy(found)


@checked_dataclass(kw_only=True)
class DinoImageDataProcessor(PrecisionArguments, StreamProcessor):
    """Load batches of several crops of images, with masks of their patches.

    Images are `root/split/CLASS/IMAGE`. Random transforms only depend on `shuffle_seed`, the epoch,
    the image and its place in the epoch; masks on `shuffle_seed`, the epoch, the place and
    `batch_size`: not on workers, processes, or where a run was resumed.

    Args:
        batch_size: Images per batch over all processes, a multiple of their number.
        shuffle: Whether to shuffle, each epoch in its own order.
        shuffle_seed: Seed of the order and of all random numbers; default: 0.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no image is lost.
        dataset: `name: Imagenet`, `root` (the folder above `train` and `val`) and `split`.
        ssl_transform: `name: Dinov2Transform`, `multi_crop_transform` and `masked_patch_transform`:
            see the documentation of data processors. Without the latter, batches have no masks.
        num_samples: Images per epoch; null = all.
        pad_last: Must be false: images have no padding.

    Shapes:
        With G global and L local crops and P patches: global_view: (B, G, 3, height, width),
        local_view: (B, L, 3, height, width), float32. collated_masks: (B, G, P), bool.
        labels: (B,), int32.

    Raises:
        ConfigError: If a folder, a transform or another argument is invalid, or, while loading,
            with the path of an image that cannot be read.
    """

    dataset: dict[str, Any]  # type: ignore[assignment]  # an argument first, then the samples
    ssl_transform: dict[str, Any]
    num_samples: Size | None = None
    pad_last: Flag = False

    def __post_init__(self) -> None:
        folder, crops, masks = self._checked()
        say_without_effect(self)
        self.options = self.loading_options()
        pillow()
        files, seed = self.load(folder.root, folder.split), self.options.shuffle_seed
        views = ImageViews(files, crops, masks, self.batch_size, seed)
        self.dataset = views  # type: ignore[assignment]  # as above
        self.members = [Member(0, len(files), self.num_samples or len(files))]

    @event("load")
    def load(self, root: str, split: str) -> ImageFiles:
        """Return the images of a split."""
        return find_images(root, split, _KIND)

    @override
    def sample_features(self, model: Any) -> Features:
        _, crops, masks = self._checked()
        found = {"labels": Feature(())}
        views = {
            "global_view": (crops.global_num_crops, crops.global_image_size),
            "local_view": (crops.local_num_crops, crops.local_image_size),
        }
        found |= {
            name: Feature((num, NUM_CHANNELS, side, side), torch.float32)
            for name, (num, side) in views.items()
            if num
        }
        if masks is not None:
            shape = crops.global_num_crops, masks.side**2
            found["collated_masks"] = Feature(shape, torch.bool)
        return found

    @override
    def missing(self) -> list[str]:
        folder, _, _ = self._checked()
        return lacking_pillow() + missing_folder(folder.root, folder.split, _KIND)

    def _checked(self) -> tuple[_Folder, CropSettings, BlockMasks | None]:
        """Return the settings of the data.

        Raises:
            ConfigError: If one is invalid, or they do not fit each other.
        """
        folder = made(_Folder, self.dataset, "dataset")
        _check_name("dataset.name", folder.name, _DATASET)
        if not folder.root:
            raise ConfigError("dataset.root is empty. Give the folder above train and val.")
        transform = made(_Transform, self.ssl_transform, "ssl_transform")
        _check_name("ssl_transform.name", transform.name, _TRANSFORM)
        crops = made(CropSettings, transform.multi_crop_transform, f"ssl_transform.{_CROPS}")
        if self.pad_last:
            raise ConfigError(
                "pad_last is true, but images have no padding rows. Set pad_last: false; with "
                "drop_last: true, all batches are full."
            )
        if transform.masked_patch_transform is None:
            return folder, crops, None
        masks = made(BlockMasks, transform.masked_patch_transform, f"ssl_transform.{_MASKS}")
        if masks.image_size != crops.global_image_size:
            raise ConfigError(
                f"ssl_transform.{_MASKS}.image_size is {masks.image_size}, but {_CROPS} has the "
                f"global_image_size {crops.global_image_size}. Make them equal."
            )
        return folder, crops, masks


def _check_name(where: str, given: str, known: str) -> None:
    if given.lower() != known.lower():
        raise ConfigError(
            f"{where}: {given!r} is not in this package. {suggest(given, (known,))} Supported: "
            f"{known}."
        )
