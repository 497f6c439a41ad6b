"""Text with images, from HDF5 files that name the files of the images."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import torch
from annotated_types import MaxLen, MinLen
from typing_extensions import override

from modelzoo_trainer.base.constraints import Size, checked_dataclass, without_effect
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dataset import RowOptions
from modelzoo_trainer.zoo.data.hdf5.image_rows import (
    IMAGES,
    PLACES,
    ImageOptions,
    ImageRows,
    missing_images,
)
from modelzoo_trainer.zoo.data.hdf5.processor import MixtureProcessor
from modelzoo_trainer.zoo.data.images.decoding import lacking_pillow, pillow
from modelzoo_trainer.zoo.data.images.reading import ImageReader
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.data.images.transforms import Pipeline, parse_transforms
from modelzoo_trainer.zoo.data.sample_features import (
    Feature,
    Features,
    length_without_data,
    rows_of,
)
from modelzoo_trainer.zoo.data.stream_processor import PrecisionArguments, say_once
from modelzoo_trainer.zoo.rows.hdf5_format import IMAGE_TEXT_FEATURES, MODALITY

ImageDataSize = Annotated[
    list[Size], MinLen(3), MaxLen(3), "a list of 3 integers: channels, height, width"
]

_CHANNELS: Final = 3
_ROWS_AS_THEY_ARE: Final = "rows are used as they are in the files"


@checked_dataclass(kw_only=True)
class LlavaHDF5MapDataProcessor(PrecisionArguments, MixtureProcessor):
    """Load batches of text with an image from HDF5 files, for `llava`.

    Files have a dataset `data` of shape (samples, 4, S), or with further features that are not
    used: `text_input_ids`, with placeholders where the image is, `loss_mask`, `labels` and
    `key_padding_mask`, 1 for padding; and a dataset `img_path` of shape (samples, 1), the names of
    the images, relative to `img_data_dir`. `None` is a black image. Random transforms only depend
    on `shuffle_seed`, the epoch and the row.

    Args:
        batch_size: Rows per batch over all processes, a multiple of their number.
        shuffle_seed: Seed of the order and of random transforms.
        use_vsl: Must be false: rows with images are not packed.
        pad_last: Whether to fill it with rows that do not count, with black images; requires
            `drop_last: false`.
        max_sequence_length: Tokens per row, if it is given: files have theirs.
        img_data_dir: The folder of the images.
        image_data_size: Channels (3), height and width of the images after the transforms.
        transforms: Changes to images, a list of `{name, ...arguments}`: see the documentation of
            data processors.

    Shapes:
        A batch: `text_input_ids`, `loss_mask`, `labels` and `key_padding_mask` (B, S), int32.
        `image_data`: (B, 3, height, width), float32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or, while loading, with file, dataset and row, if an image cannot be read.
    """

    features: ClassVar[tuple[str, ...]] = IMAGE_TEXT_FEATURES
    img_data_dir: str
    image_data_size: ImageDataSize
    transforms: list[dict[str, Any]]
    bos_token_id: Any = without_effect(_ROWS_AS_THEY_ARE)
    pos_token_id: Any = without_effect(_ROWS_AS_THEY_ARE)

    def __post_init__(self) -> None:
        size, pipeline = self._checked()
        pillow()
        if lacks := missing_images(self.img_data_dir):
            raise ConfigError(lacks[0])
        reader = ImageReader(pipeline, size, "image_data_size", self.shuffle_seed)
        has_places = MODALITY in self.features
        self.begin(
            RowOptions(
                max_sequence_length=self.max_sequence_length,
                features=self.features,
                num_samples=self.num_samples,
                images=ImageOptions(self.img_data_dir, reader, size, has_places),
            )
        )
        assert isinstance(self.dataset, ImageRows)
        num = self.dataset.files.row_shape[0]
        if num > len(self.features):
            say_once(
                f"{type(self).__name__}: the files have {num} features in each row; only the "
                f"first {len(self.features)} are used."
            )

    @override
    def sample_features(self, model: Any) -> Features:
        found = rows_of(self.features, length_without_data(self, model))
        pixels = Feature(tuple(self.image_data_size), torch.float32)
        num = getattr(model, "num_features_of_image", None)
        if MODALITY not in self.features or num is None:
            return found | {IMAGES: pixels}
        # Files decide how many images a row may have; one, in a plan without them.
        pixels = pixels._replace(shape=(1, *pixels.shape))
        return found | {IMAGES: pixels, PLACES: Feature((1, num))}

    @override
    def missing(self) -> list[str]:
        self._checked()
        return super().missing() + lacking_pillow() + missing_images(self.img_data_dir)

    def _checked(self) -> tuple[Hw, Pipeline]:
        """Return the size of images and their transforms.

        Raises:
            ConfigError: If an argument is invalid, or arguments do not fit each other.
        """
        for name, reason in (
            ("use_vsl", "rows with images are not packed"),
            ("dataset_map_fn", "the rows of files are used as they are"),
        ):
            if getattr(self, name):
                raise ConfigError(
                    f"{type(self).__name__}.{name} cannot be used: {reason}. Remove it."
                )
        if not self.img_data_dir or "\0" in self.img_data_dir:
            raise ConfigError(f"img_data_dir: expected a folder, got {self.img_data_dir!r}.")
        channels, height, width = self.image_data_size
        if channels != _CHANNELS:
            raise ConfigError(
                f"image_data_size is {self.image_data_size}, but images have {_CHANNELS} channels: "
                f"it must be [{_CHANNELS}, height, width]. Change it."
            )
        pipeline = parse_transforms(self.transforms)
        if pipeline.size not in (None, (height, width)):
            raise ConfigError(
                f"image_data_size is {self.image_data_size}, but images have "
                f"{list(pipeline.size or ())} pixels after the transforms. Set both to the "
                f"image_size of the model."
            )
        return (height, width), pipeline


@checked_dataclass(kw_only=True)
class MultimodalSimpleHDF5MapDataProcessor(LlavaHDF5MapDataProcessor):
    """Load batches of text with several images from HDF5 files, for `multimodal_simple`.

    Files have a dataset `data` of shape (samples, 5, S), or with further features that are not
    used: `text_input_ids`, with placeholders where images are, `loss_mask`, `labels`,
    `key_padding_mask`, 1 for padding, and `token_modality_idx`, 1 for placeholders; a dataset
    `img_path` of shape (samples, I), the names of the images, relative to `img_data_dir`; and a
    dataset `img_data_loc` of shape (samples, I, P), the positions of the features of each image. An
    image that a row does not have is called `None`, and has the positions S. Random transforms only
    depend on `shuffle_seed`, the epoch, the row and the image.

    Shapes:
        A batch: `text_input_ids`, `loss_mask`, `labels`, `key_padding_mask` and
        `token_modality_idx` (B, S), int32. `image_data`: (B, I, 3, height, width), float32.
        `image_data_loc`: (B, I, P), int32.

    Raises:
        ConfigError: If a file is damaged or does not fit the others or the arguments, with its
            name; or, while loading, with file, dataset and row, if an image cannot be read.
    """

    features: ClassVar[tuple[str, ...]] = (*IMAGE_TEXT_FEATURES, MODALITY)
    pad_token_id: Any = without_effect(_ROWS_AS_THEY_ARE)
    max_num_img: Size | None = without_effect("the files have the number of images in a row")
    num_patches: Size | None = without_effect("the files have the number of features of an image")
    micro_batch_size: Any = without_effect("callbacks with flags set it")
    noaugment: Any = without_effect("transforms decides")
