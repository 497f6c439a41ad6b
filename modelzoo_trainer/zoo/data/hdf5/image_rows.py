"""Batches of text with images: rows of HDF5 files, which name files of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.files import RowFile, RowFiles
from modelzoo_trainer.zoo.data.hdf5.open_files import OpenFiles
from modelzoo_trainer.zoo.data.hdf5.rows import Ints, SampleRows, Segments, padded
from modelzoo_trainer.zoo.data.hdf5.sending import Batch, by_feature
from modelzoo_trainer.zoo.data.images.decoding import pillow
from modelzoo_trainer.zoo.data.images.reading import ImageReader
from modelzoo_trainer.zoo.data.images.transform import Hw
from modelzoo_trainer.zoo.rows.hdf5_format import NO_IMAGE

IMAGES: Final = "image_data"
PLACES: Final = "image_data_loc"


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How the images of a row are read.

    Args:
        folder: Where they lie.
        reader: Their transforms, and the size in the end.
        blank: Height and width of the black image, before its transforms, in place of one that a
            row does not have.
        has_places: Whether a dataset says where their features are; then a row has several images,
            else one.
    """

    folder: str
    reader: ImageReader
    blank: Hw
    has_places: bool


class _Images(NamedTuple):
    names: NDArray[Any]  # (B, I), texts
    places: NDArray[np.int32] | None  # (B, I, P)


class ImageRows(SampleRows):
    """Rows of text, with the images that another dataset of the same files names.

    Args:
        files: The rows of text.
        names: For each file, its dataset with the names of images.
        places: The positions of features of images; None = the model knows them.
        segments: Which of the rows are the samples.
        features: Names of the first rows of a sample; others are not used.
        images: How images are read.

    Shapes:
        A batch: features (B, S), int32. `image_data`: (B, 3, height, width), float32; with `places`
        (B, I, 3, height, width), and `image_data_loc`, (B, I, P), int32.

    Raises:
        ConfigError: If the datasets do not fit each other.
    """

    def __init__(
        self,
        files: RowFiles,
        names: Sequence[RowFile],
        places: RowFiles | None,
        segments: Segments,
        *,
        features: Sequence[str],
        images: ImageOptions,
    ) -> None:
        super().__init__(files, segments, features=features)
        self._names = tuple(names)
        self._places = places
        self._images = images
        self._folder = os.path.expanduser(images.folder)
        self._texts = OpenFiles()
        self._written_over: tuple[int, int] | None = None
        self._num_features: int | None = None
        self._check_datasets()

    def _check_datasets(self) -> None:
        others = [self._names] if self._places is None else [self._names, self._places.files]
        for datasets in others:
            self.files.check_num_rows(datasets, "Preprocess the data again.")
        first = self._names[0]
        for one in self._names:
            shape = one.row_shape
            if len(shape) != 1 or shape != first.row_shape:
                raise ConfigError(
                    f"{one.path}: dataset {one.dataset!r} has rows of shape {shape}, expected "
                    f"(images,), with the same number in all files. Preprocess the data again."
                )
        self._check_numbers(first.row_shape[0])

    def _check_numbers(self, num: int) -> None:
        """Check that a row may have this number of images."""
        first = self._names[0]
        if self._places is None:
            if num != 1:
                raise ConfigError(
                    f"{first.path}: dataset {first.dataset!r} names {num} images in each row, but "
                    f"this data processor reads one. Use MultimodalSimpleHDF5MapDataProcessor, for "
                    f"multimodal_simple."
                )
            return
        shape = self._places.row_shape
        if len(shape) != 2 or shape[0] != num:
            raise ConfigError(
                f"{first.path}: dataset {self._places.files[0].dataset!r} has rows of shape "
                f"{shape}, expected ({num}, patches), as {first.dataset!r} names {num} images in "
                f"each row. Preprocess the data again."
            )

    # ---- the model

    def follow_model(self, model: Any) -> None:
        """Take where the model writes features of images, to check that placeholders are there.

        Raises:
            ConfigError: If they have no room in a row.
        """
        self._written_over = getattr(model, "image_positions", None)
        self._num_features = getattr(model, "num_features_of_image", None)
        first = self.files.files[0]
        if self._written_over is not None and self._written_over[1] > self.length:
            start, end = self._written_over
            raise ConfigError(
                f"{first.path}: rows have {self.length} positions, but the model writes "
                f"{end - start} features of an image from image_start_idx {start} on. Decrease "
                f"image_start_idx, or use data for images of as many patches."
            )
        if self._places is not None and self._num_features is not None:
            num = self._places.row_shape[1]
            if num != self._num_features:
                raise ConfigError(
                    f"{first.path}: dataset {self._places.files[0].dataset!r} has {num} positions "
                    f"for each image, but the model has {self._num_features} features of one. "
                    f"Preprocess the data with num_patches: {self._num_features}, or change the "
                    f"image model."
                )

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._images.reader.epoch = epoch

    # ---- rows

    @override
    def _read(self, places: Ints) -> NDArray[np.int32]:
        raw = super()._read(places)[: len(self.features)]
        if self._written_over is not None:
            self._check_placeholders(raw[0], places, *self._written_over)
        return raw

    @override
    def _probe(self, places: Ints) -> None:
        ids = self._read(places)[0]
        images = self._of(places, ids)
        for number, place in enumerate(places.tolist()):
            for name in images.names[number]:
                self._path(name, place)

    @override
    def _batch(self, places: Ints, rows: Any, size: int) -> Batch:
        read = self._read(places)
        batch = by_feature(padded(read, rows, size), self.features)
        images = self._of(places, read[0])
        reader, num = self._images.reader, images.names.shape[1]
        pixels = reader.empty(size, num)
        pixels[rows] = self._pixels(images.names, places)
        several = self._places is not None
        batch[IMAGES] = reader.numbers(pixels if several else pixels[:, 0])
        if images.places is not None:
            found = np.full((size, *images.places.shape[1:]), self.length, np.int32)
            found[rows] = images.places
            batch[PLACES] = torch.from_numpy(found)
        return batch

    def _pixels(self, names: NDArray[Any], places: Ints) -> NDArray[np.uint8]:
        """Return the pixels of the images of rows, (B, I, height, width, 3)."""
        found = self._images.reader.empty(*names.shape)
        num = names.shape[1]
        for number, place in enumerate(places.tolist()):
            for idx, name in enumerate(names[number]):
                path = self._path(name, place)
                found[number, idx] = self._image(path, place, place * num + idx)
        return found

    def _image(self, path: str | None, place: int, index: int) -> NDArray[np.uint8]:
        options = self._images
        if path is None:
            height, width = options.blank
            black = pillow().new("RGB", (width, height))
            return options.reader.changed(black, f"{self._named(place)}: no image", index)
        try:
            return options.reader.read(path, index)
        except ConfigError as error:
            raise ConfigError(f"{self._named(place)}: {error}") from error

    def _of(self, places: Ints, ids: NDArray[np.int32]) -> _Images:
        """Return the names of the images of rows, and the positions of their features.

        `ids`: the tokens of the rows, (B, S).
        """
        numbers, inner = self.files.locate(places)
        names = np.empty((len(places), *self._names[0].row_shape), object)
        for row, (number, one) in enumerate(zip(numbers.tolist(), inner.tolist(), strict=True)):
            names[row] = self._texts.read(self._names[number], one, one + 1)[0]
        if self._places is None:
            return _Images(names, None)
        found = np.empty((len(places), *self._places.row_shape), self._places.dtype)
        for row, (number, one) in enumerate(zip(numbers.tolist(), inner.tolist(), strict=True)):
            found[row] = self._open.read(self._places.files[number], one, one + 1)[0]
        self._check_places(found, names, places)
        self._check_overwritten(found.reshape(len(found), -1), ids, places)
        return _Images(names, found.astype(np.int32))

    def _path(self, name: Any, place: int) -> str | None:
        """Return the path of an image, None if the row does not have it.

        Raises:
            ConfigError: If there is no such file.
        """
        text = os.fsdecode(name) if isinstance(name, bytes | str) else ""
        if text == NO_IMAGE:
            return None
        if not text or "\0" in text:
            raise ConfigError(
                f"{self._named(place)}: {text!r} names no image. Where a row has none, it must be "
                f"{NO_IMAGE!r}. Preprocess the data again."
            )
        path = os.path.join(self._folder, text)
        if not os.path.isfile(path):
            problem = "is not a file" if os.path.exists(path) else "does not exist"
            raise ConfigError(
                f"{self._named(place)}: the image {text!r} {problem} in img_data_dir "
                f"{self._images.folder!r}. Add it, or correct img_data_dir."
            )
        return path

    def _named(self, place: int) -> str:
        """Return the file, the dataset of names and the row, for messages."""
        (number,), (inner,) = self.files.locate(np.array([place]))
        one = self._names[number]
        return f"{one.path}: dataset {one.dataset!r}, row {inner}"

    # ---- checks

    def _check_placeholders(
        self, ids: NDArray[np.int32], places: Ints, start: int, end: int
    ) -> None:
        """Check that rows have one token where the model writes the features of an image."""
        over = ids[:, start:end]
        wrong = (over != over[:, :1]).any(axis=1)
        if not wrong.any():
            return
        row = int(np.nonzero(wrong)[0][0])
        column = int(np.nonzero(over[row] != over[row, 0])[0][0])
        raise ConfigError(
            f"{self.files.place_of(int(places[row]))}: the model writes features of the image over "
            f"columns {start} to {end - 1}, where {self.features[0]} must have the same "
            f"placeholder, but column {start} has {over[row, 0]} and column {start + column} has "
            f"{over[row, column]}. Set image_start_idx of the model to the first placeholder, and "
            f"use data for images of {end - start} patches."
        )

    def _check_places(self, found: NDArray[Any], names: NDArray[Any], places: Ints) -> None:
        """Check that features of images are inside their rows, and others after their end."""
        assert self._places is not None
        absent = np.array([[self._is_absent(one) for one in row] for row in names])
        highest = np.where(absent, self.length, self.length - 1)[..., None]
        lowest = np.where(absent, self.length, 0)[..., None]
        wrong = (found < lowest) | (found > highest)
        if not wrong.any():
            return
        row, image, column = (int(one[0]) for one in np.nonzero(wrong))
        is_absent = absent[row, image]
        expected = (
            f"{self.length}, as the row does not have the image"
            if is_absent
            else f"a position from 0 to {self.length - 1}"
        )
        raise ConfigError(
            f"{self._places.place_of(int(places[row]))}: image {image} has "
            f"{found[row, image, column]} in column {column}, expected {expected}. Preprocess the "
            f"data again."
        )

    def _check_overwritten(self, found: NDArray[Any], ids: NDArray[np.int32], places: Ints) -> None:
        """Check that each feature of a row has a position of its own, with one placeholder in all.

        Shapes:
            found: (B, I * P), positions that are S for images that are not there. ids: (B, S).
        """
        assert self._places is not None
        num = found.shape[1]
        order = np.sort(found, axis=1)
        twice = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] < self.length)
        if twice.any():
            row, place = (int(one[0]) for one in np.nonzero(twice))
            raise ConfigError(
                f"{self._places.place_of(int(places[row]))}: two features have the position "
                f"{order[row, place]}, but each needs one of its own. Preprocess the data again."
            )
        is_there = found < self.length
        tokens = np.take_along_axis(ids, np.minimum(found, self.length - 1), axis=1)
        first = tokens[np.arange(len(found)), is_there.argmax(axis=1)]
        wrong = is_there & (tokens != first[:, None])
        if wrong.any():
            row, place = (int(one[0]) for one in np.nonzero(wrong))
            raise ConfigError(
                f"{self._places.place_of(int(places[row]))}: feature {place} of {num} has the "
                f"position {found[row, place]}, where {self.features[0]} has {tokens[row, place]}, "
                f"but the first one has the placeholder {first[row]}. Features must be written "
                f"over equal placeholders. Preprocess the data again."
            )

    @staticmethod
    def _is_absent(name: Any) -> bool:
        return isinstance(name, bytes | str) and os.fsdecode(name) == NO_IMAGE


def missing_images(img_data_dir: str) -> list[str]:
    """Return a message if the folder of images cannot be read now; nothing is opened."""
    path = Path(img_data_dir).expanduser()
    if path.is_dir():
        return []
    problem = "is not a folder" if path.exists() else "does not exist"
    return [
        f"img_data_dir {img_data_dir!r} {problem}. Give the folder that the names of images in the "
        f".h5 files begin in."
    ]
