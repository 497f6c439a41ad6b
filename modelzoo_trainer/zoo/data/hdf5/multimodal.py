"""Text with images, from HDF5 files that name the files of the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from annotated_types import MaxLen, MinLen

from modelzoo_trainer.base.constraints import (
    Flag,
    NonNegativeSize,
    PositiveInt,
    Size,
    checked,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.image_rows import ImageOptions, ImageRows, missing_images
from modelzoo_trainer.zoo.data.hdf5.processor import HDF5Processor, check_padding, lacks_of
from modelzoo_trainer.zoo.data.hdf5.selection import Source, parse_sources
from modelzoo_trainer.zoo.data.images.decoding import lacking_pillow, pillow
from modelzoo_trainer.zoo.data.images.reading import ImageReader
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.data.images.transforms import Pipeline, parse_transforms
from modelzoo_trainer.zoo.data.processor import LoadingOptions, ShuffleSeed
from modelzoo_trainer.zoo.data.stream_processor import say_once, say_without_effect
from modelzoo_trainer.zoo.rows.hdf5_format import IMAGE_TEXT_FEATURES, MODALITY

ImageDataSize = Annotated[
    list[Size], MinLen(3), MaxLen(3), "a list of 3 integers: channels, height, width"
]

_CHANNELS: Final = 3
_NO_EFFECT: Final = {
    "use_worker_cache": "files are read where they are",
    "sort_files": "files are always sorted by their paths",
    "vocab_size": "token ids are compared with the vocab_size of the model",
    "bos_token_id": "rows are used as they are in the files",
    "pos_token_id": "rows are used as they are in the files",
    "pad_token_id": "rows are used as they are in the files",
    "max_num_img": "the files have the number of images in a row",
    "num_patches": "the files have the number of features of an image",
    "micro_batch_size": "callbacks with flags set it",
    "noaugment": "transforms decides",
    "mixed_precision": "the section precision decides what a model gets",
    "fp16_type": "the section precision decides what a model gets",
}


class LlavaHDF5MapDataProcessor(HDF5Processor):
    """Load batches of text with an image from HDF5 files, for `llava`.

    Files have a dataset `data` of shape (samples, 4, S), or with further features that are not
    used: `text_input_ids`, with placeholders where the image is, `loss_mask`, `labels` and
    `key_padding_mask`, 1 for padding; and a dataset `img_path` of shape (samples, 1), the names of
    the images, relative to `img_data_dir`. `None` is a black image. Random transforms only depend
    on `shuffle_seed`, the epoch and the row.

    Args:
        batch_size: Rows per batch over all processes, a multiple of their number.
        img_data_dir: The folder of the images.
        image_data_size: Channels (3), height and width of the images after the transforms.
        transforms: Changes to images, a list of `{name, ...arguments}`: see the documentation of
            data processors.
        data_dir: One or a list of folders with `.h5` files, which are read in the order of their
            paths; subfolders are not read. Give either this or `mixture`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`: each batch has
            samples of all, in the proportion of the weights over an epoch.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order and of random transforms.
        num_workers: Number of worker processes; 0 = load in the main process.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        data_subset: Fractions of the samples to use, such as `0.0-0.3,0.7-1.0`.
        num_samples: Samples per epoch; default: all, or as many as a mixture needs until its larger
            folders are used up.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        pad_last: Whether to fill it with rows that do not count, with black images; requires
            `drop_last: false`.
        max_sequence_length: Tokens per row, if it is given: files have theirs.
        use_vsl: Must be false: rows with images are not packed.
        dataset_map_fn: Not supported.
        sort_files: No effect: files are always sorted.
        use_worker_cache: No effect.
        vocab_size: No effect.
        bos_token_id: No effect.
        pos_token_id: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        A batch: `text_input_ids`, `loss_mask`, `labels` and `key_padding_mask` (B, S), int32.
        `image_data`: (B, 3, height, width), float32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or, while loading, with file, dataset and row, if an image cannot be read.
    """

    @checked()
    def __init__(
        self,
        *,
        batch_size: PositiveInt,
        img_data_dir: str,
        image_data_size: ImageDataSize,
        transforms: list[dict[str, Any]],
        data_dir: str | list[str] | None = None,
        mixture: list[dict[str, Any]] | None = None,
        shuffle: Flag = False,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        data_subset: str | None = None,
        num_samples: Size | None = None,
        drop_last: Flag = True,
        pad_last: Flag = False,
        max_sequence_length: Size | None = None,
        use_vsl: Flag = False,
        dataset_map_fn: Any = None,
        sort_files: Flag = True,
        use_worker_cache: Flag = False,
        vocab_size: Any = None,
        bos_token_id: Any = None,
        pos_token_id: Any = None,
        mixed_precision: Any = None,
        fp16_type: Any = None,
    ) -> None:
        ignored = {
            "sort_files": not sort_files,
            "use_worker_cache": use_worker_cache,
            "vocab_size": vocab_size,
            "bos_token_id": bos_token_id,
            "pos_token_id": pos_token_id,
            "mixed_precision": mixed_precision,
            "fp16_type": fp16_type,
        }
        given = {
            "img_data_dir": img_data_dir,
            "image_data_size": image_data_size,
            "transforms": transforms,
            "data_dir": data_dir,
            "mixture": mixture,
            "data_subset": data_subset,
            "num_samples": num_samples,
            "max_sequence_length": max_sequence_length,
            "shuffle_seed": shuffle_seed,
            "use_vsl": use_vsl,
            "dataset_map_fn": dataset_map_fn,
        }
        self._open(
            given,
            ignored,
            LoadingOptions(
                global_batch_size=batch_size,
                shuffle=shuffle,
                shuffle_seed=shuffle_seed,
                num_workers=num_workers,
                drop_last=drop_last,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
            ),
            pad_last=pad_last,
        )

    def _open(
        self,
        given: Mapping[str, Any],
        ignored: Mapping[str, Any],
        options: LoadingOptions,
        *,
        pad_last: bool,
        has_places: bool = False,
    ) -> None:
        owner = type(self).__name__
        sources, size, pipeline = _checked(owner, given)
        say_without_effect(owner, ignored, _NO_EFFECT)
        check_padding(owner, drop_last=options.drop_last, pad_last=pad_last, has_function=False)
        pillow()
        if lacks := missing_images(given["img_data_dir"]):
            raise ConfigError(lacks[0])
        reader = ImageReader(pipeline, size, "image_data_size", options.shuffle_seed)
        features = IMAGE_TEXT_FEATURES + ((MODALITY,) if has_places else ())
        rows = RowOptions(
            max_sequence_length=given["max_sequence_length"],
            features=features,
            num_samples=given["num_samples"],
            images=ImageOptions(given["img_data_dir"], reader, size, has_places),
        )
        self.begin(sources, rows, options, pad_last=pad_last)
        assert isinstance(self.dataset, ImageRows)
        num = self.dataset.files.row_shape[0]
        if num > len(features):
            say_once(
                f"{owner}: the files have {num} features in each row, of which the first "
                f"{len(features)} are used."
            )

    @classmethod
    def check_arguments(cls, **arguments: Any) -> list[str]:
        """Check the arguments without opening files; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        sources, _, _ = _checked(cls.__name__, arguments)
        return lacks_of(sources) + lacking_pillow() + missing_images(arguments["img_data_dir"])


class MultimodalSimpleHDF5MapDataProcessor(LlavaHDF5MapDataProcessor):
    """Load batches of text with several images from HDF5 files, for `multimodal_simple`.

    Files have a dataset `data` of shape (samples, 5, S), or with further features that are not
    used: `text_input_ids`, with placeholders where images are, `loss_mask`, `labels`,
    `key_padding_mask`, 1 for padding, and `token_modality_idx`, 1 for placeholders; a dataset
    `img_path` of shape (samples, I), the names of the images, relative to `img_data_dir`; and a
    dataset `img_data_loc` of shape (samples, I, P), the positions of the features of each image. An
    image that a row does not have is called `None`, and has the positions S. Random transforms only
    depend on `shuffle_seed`, the epoch, the row and the image.

    Args:
        batch_size: Rows per batch over all processes, a multiple of their number.
        img_data_dir: The folder of the images.
        image_data_size: Channels (3), height and width of the images after the transforms.
        transforms: Changes to images, a list of `{name, ...arguments}`: see the documentation of
            data processors.
        data_dir: One or a list of folders with `.h5` files, which are read in the order of their
            paths; subfolders are not read. Give either this or `mixture`.
        mixture: Folders with weights, a list of `{data_dir, weight, data_subset}`: each batch has
            samples of all, in the proportion of the weights over an epoch.
        shuffle: Whether to shuffle; each epoch has its own order.
        shuffle_seed: Seed of the order and of random transforms.
        num_workers: Number of worker processes; 0 = load in the main process.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
        data_subset: Fractions of the samples to use, such as `0.0-0.3,0.7-1.0`.
        num_samples: Samples per epoch; default: all, or as many as a mixture needs until its larger
            folders are used up.
        drop_last: Whether an incomplete batch at the end of an epoch begins the next epoch instead;
            no sample is lost.
        pad_last: Whether to fill it with rows that do not count, with black images; requires
            `drop_last: false`.
        max_sequence_length: Tokens per row, if it is given: files have theirs.
        use_vsl: Must be false: rows with images are not packed.
        dataset_map_fn: Not supported.
        sort_files: No effect: files are always sorted.
        use_worker_cache: No effect.
        vocab_size: No effect.
        bos_token_id: No effect.
        pos_token_id: No effect.
        pad_token_id: No effect.
        max_num_img: No effect.
        num_patches: No effect.
        micro_batch_size: No effect.
        noaugment: No effect.
        mixed_precision: No effect.
        fp16_type: No effect.

    Shapes:
        A batch: `text_input_ids`, `loss_mask`, `labels`, `key_padding_mask` and
        `token_modality_idx` (B, S), int32. `image_data`: (B, I, 3, height, width), float32.
        `image_data_loc`: (B, I, P), int32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or, while loading, with file, dataset and row, if an image cannot be read.
    """

    @checked()
    def __init__(
        self,
        *,
        batch_size: PositiveInt,
        img_data_dir: str,
        image_data_size: ImageDataSize,
        transforms: list[dict[str, Any]],
        data_dir: str | list[str] | None = None,
        mixture: list[dict[str, Any]] | None = None,
        shuffle: Flag = False,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        prefetch_factor: Size | None = 10,
        persistent_workers: Flag = True,
        data_subset: str | None = None,
        num_samples: Size | None = None,
        drop_last: Flag = True,
        pad_last: Flag = False,
        max_sequence_length: Size | None = None,
        use_vsl: Flag = False,
        dataset_map_fn: Any = None,
        sort_files: Flag = True,
        use_worker_cache: Flag = False,
        vocab_size: Any = None,
        bos_token_id: Any = None,
        pos_token_id: Any = None,
        pad_token_id: Any = None,
        max_num_img: Size | None = None,
        num_patches: Size | None = None,
        micro_batch_size: Any = None,
        noaugment: Any = None,
        mixed_precision: Any = None,
        fp16_type: Any = None,
    ) -> None:
        ignored = {
            "sort_files": not sort_files,
            "use_worker_cache": use_worker_cache,
            "vocab_size": vocab_size,
            "bos_token_id": bos_token_id,
            "pos_token_id": pos_token_id,
            "pad_token_id": pad_token_id,
            "max_num_img": max_num_img,
            "num_patches": num_patches,
            "micro_batch_size": micro_batch_size,
            "noaugment": noaugment,
            "mixed_precision": mixed_precision,
            "fp16_type": fp16_type,
        }
        given = {
            "img_data_dir": img_data_dir,
            "image_data_size": image_data_size,
            "transforms": transforms,
            "data_dir": data_dir,
            "mixture": mixture,
            "data_subset": data_subset,
            "num_samples": num_samples,
            "max_sequence_length": max_sequence_length,
            "shuffle_seed": shuffle_seed,
            "use_vsl": use_vsl,
            "dataset_map_fn": dataset_map_fn,
        }
        self._open(
            given,
            ignored,
            LoadingOptions(
                global_batch_size=batch_size,
                shuffle=shuffle,
                shuffle_seed=shuffle_seed,
                num_workers=num_workers,
                drop_last=drop_last,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
            ),
            pad_last=pad_last,
            has_places=True,
        )


def _checked(owner: str, given: Mapping[str, Any]) -> tuple[list[Source], Hw, Pipeline]:
    """Return the folders, the size of images and their transforms.

    Raises:
        ConfigError: If an argument is invalid, or arguments do not fit each other.
    """
    for name, reason in (
        ("use_vsl", "rows with images are not packed"),
        ("dataset_map_fn", "the rows of files are used as they are"),
    ):
        if given.get(name):
            raise ConfigError(f"{owner}.{name} cannot be used: {reason}. Remove it.")
    folder = given["img_data_dir"]
    if not folder or "\0" in folder:
        raise ConfigError(f"img_data_dir: expected a folder, got {folder!r}.")
    channels, height, width = given["image_data_size"]
    if channels != _CHANNELS:
        raise ConfigError(
            f"image_data_size is {given['image_data_size']}, but images have {_CHANNELS} channels: "
            f"it must be [{_CHANNELS}, height, width]. Change it."
        )
    pipeline = parse_transforms(given["transforms"])
    if pipeline.size not in (None, (height, width)):
        raise ConfigError(
            f"image_data_size is {given['image_data_size']}, but images have "
            f"{list(pipeline.size or ())} pixels after the transforms. Set both to the image_size "
            f"of the model."
        )
    sources = parse_sources(given.get("data_dir"), given.get("mixture"), given.get("data_subset"))
    return sources, (height, width), pipeline
