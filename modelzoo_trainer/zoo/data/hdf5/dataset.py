"""Open the dataset that the arguments of a processor describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modelzoo_trainer.core.parts.model_length import model_length
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.stream import Member
from modelzoo_trainer.zoo.data.hdf5.files import (
    FolderState,
    RowFile,
    RowFiles,
    find_files,
    fingerprint_of,
    read_header,
)
from modelzoo_trainer.zoo.data.hdf5.image_rows import ImageOptions, ImageRows
from modelzoo_trainer.zoo.data.hdf5.masked_rows import MaskedRows
from modelzoo_trainer.zoo.data.hdf5.retrieval_rows import CONTEXT_DATASET, RetrievalRows
from modelzoo_trainer.zoo.data.hdf5.rows import (
    CorpusRows,
    HDF5Rows,
    MappedRows,
    SampleRows,
    Segments,
)
from modelzoo_trainer.zoo.data.hdf5.selection import SampleRange, SampleSource, runs_of, shares_of
from modelzoo_trainer.zoo.data.hdf5.transforms import BatchTransform
from modelzoo_trainer.zoo.rows.hdf5_format import (
    DATASET,
    FEATURES,
    IMAGE_NAMES,
    IMAGE_PLACES,
    LABELS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How samples are read.

    Args:
        max_sequence_length: Tokens per sample of a corpus; None = files have whole samples.
        features: Names of the rows of a sample in a file.
        vsl: Whether they have packed documents.
        transforms: Applied to each batch.
        seed: Of the transforms.
        num_samples: Samples of an epoch; None = all.
        map_fn: Makes a sample of an array of a file; None = its rows are the features.
        has_labels: Whether the labels of masked tokens are in a dataset of their own.
        dataset: Name of the dataset with the samples.
        context_features: Names of the rows of contexts, in a dataset of their own; () = none.
        images: How the images of each row are read; None = there are none.
    """

    max_sequence_length: int | None = None
    features: Sequence[str] = FEATURES
    vsl: bool = False
    transforms: Sequence[BatchTransform] = ()
    seed: int = 0
    num_samples: int | None = None
    map_fn: Callable[[Any], Any] | None = None
    has_labels: bool = False
    dataset: str = DATASET
    context_features: Sequence[str] = ()
    images: ImageOptions | None = None


def open_dataset(
    sources: Sequence[SampleSource], options: RowOptions
) -> tuple[HDF5Rows | MappedRows, list[Member]]:
    """Return the samples of all sources, and how many of each are in an epoch.

    Raises:
        ConfigError: If a folder or a file cannot be read, or does not fit the arguments.
    """
    groups = [
        [read_header(path, options.dataset) for path in find_files(source.folders, source.argument)]
        for source in sources
    ]
    files = RowFiles.of(groups)
    length = _corpus_length(files, options)
    placed: list[tuple[int, SampleRange]] = []
    counts = []
    first = 0
    for source, group in zip(sources, groups, strict=True):
        num_rows = sum(one.num_rows for one in group)
        num = num_rows if length is None else (num_rows - 1) // length
        runs = runs_of(source.ranges, num)
        if not runs:
            raise _nothing_selected(source, num, num_rows, length)
        placed += [(first, run) for run in runs]
        counts.append(sum(run.stop - run.start for run in runs))
        first += num_rows
    step = 1 if length is None else length
    dataset = _dataset(groups, files, Segments.of(placed, step), length, options)
    dataset.states = tuple(
        FolderState(source.folders, group) for source, group in zip(sources, groups, strict=True)
    )
    dataset.fingerprint = fingerprint_of(groups, placed)
    members = _members(sources, counts, options.num_samples)
    return (dataset if options.map_fn is None else MappedRows(dataset, options.map_fn)), members


def _corpus_length(files: RowFiles, options: RowOptions) -> int | None:
    """Return the tokens per sample of a corpus; None = the files have whole samples.

    Raises:
        ConfigError: If the arguments do not fit the shape of the data.
    """
    path, shape, length = files.files[0].path, files.row_shape, options.max_sequence_length
    where = f"{path}: dataset {options.dataset!r}"
    if not shape:
        needed = _needs_samples(options)
        if needed:
            advice = " with training_objective: mlm" if options.has_labels else ""
            raise ConfigError(
                f"{where} is 1-D, a corpus of tokens, but {needed} require samples. Preprocess the "
                f"data{advice}."
            )
        length = length or model_length("max_sequence_length", where)
        if length is None:
            raise ConfigError(
                f"{where} is 1-D, a corpus of tokens, which requires max_sequence_length: the "
                f"tokens per sample. Set it."
            )
        if options.vsl:
            raise ConfigError(
                f"{where} is 1-D, a corpus of tokens, but use_vsl requires samples of packed "
                f"documents, of shape (samples, 5, tokens). Remove use_vsl."
            )
        return length
    if len(shape) != 2:
        raise ConfigError(
            f"{where} has rows of shape {shape}, expected (features, tokens). Preprocess the data "
            f"again."
        )
    if length is not None and length != shape[1]:
        raise ConfigError(
            f"max_sequence_length is {length}, but the samples of {where} have {shape[1]} tokens. "
            f"Remove max_sequence_length: it is for files of tokens without samples."
        )
    may_have_more = options.images is not None and shape[0] > len(options.features)
    if options.map_fn is None and shape[0] != len(options.features) and not may_have_more:
        raise _other_features(where, shape[0], options)
    return None


def _needs_samples(options: RowOptions) -> str:
    """Return what requires files of whole samples, "" if nothing does."""
    if options.has_labels:
        return "masked tokens"
    if options.context_features:
        return "questions with contexts"
    return "" if options.images is None else "images"


def _other_features(where: str, num: int, options: RowOptions) -> ConfigError:
    names = ", ".join(options.features)
    if options.vsl:
        advice = "Remove use_vsl, or use data that was preprocessed with use_vsl."
    elif num == len(options.features) + 2:
        advice = "If it was preprocessed with use_vsl, set use_vsl: true."
    else:
        advice = "Use data that was preprocessed for this processor."
    return ConfigError(
        f"{where} has {num} features per sample, but {len(options.features)} are expected "
        f"({names}). {advice}"
    )


def _nothing_selected(
    source: SampleSource, num: int, num_rows: int, length: int | None
) -> ConfigError:
    folders = ", ".join(repr(folder) for folder in source.folders)
    if not num:
        return ConfigError(
            f"max_sequence_length is {length}, but {source.argument} {folders} has only {num_rows} "
            f"tokens. Decrease it, or add data."
        )
    shown = ",".join(f"{float(start):g}-{float(stop):g}" for start, stop in source.ranges)
    return ConfigError(
        f"data_subset {shown!r} selects none of the {num} samples in {source.argument} {folders}. "
        f"Use larger ranges."
    )


def _dataset(
    groups: Sequence[Sequence[RowFile]],
    files: RowFiles,
    segments: Segments,
    length: int | None,
    options: RowOptions,
) -> HDF5Rows:
    def beside(name: str) -> RowFiles:  # another dataset of the same files
        return RowFiles.of([[read_header(one.path, name) for one in group] for group in groups])

    if options.images is not None:
        texts = [
            read_header(one.path, IMAGE_NAMES, has_texts=True) for group in groups for one in group
        ]
        places = beside(IMAGE_PLACES) if options.images.has_places else None
        return ImageRows(
            files, texts, places, segments, features=options.features, images=options.images
        )
    more: dict[str, Any] = {"transforms": options.transforms, "seed": options.seed}
    if options.has_labels:
        return MaskedRows(files, beside(LABELS), segments, features=options.features)
    if options.context_features:
        return RetrievalRows(
            files,
            beside(CONTEXT_DATASET),
            segments,
            features=options.features,
            context_features=options.context_features,
        )
    if length is not None:
        found: HDF5Rows = CorpusRows(files, segments, length, **more)
    else:
        features = options.features if options.map_fn is None else ()
        found = SampleRows(files, segments, features=features, **more)
    num = found.length
    for transform in options.transforms:
        num = transform.length_after(num)
    return found


def _members(
    sources: Sequence[SampleSource], counts: Sequence[int], num_samples: int | None
) -> list[Member]:
    shares = shares_of([source.weight for source in sources], counts, num_samples)
    members, offset = [], 0
    for source, count, share in zip(sources, counts, shares, strict=True):
        if not share:
            raise ConfigError(
                f"{source.argument}: its weight of {float(source.weight):.3g} of all is less than "
                f"one sample of the {sum(shares)} in an epoch. Increase the weight or num_samples, "
                f"or remove the element."
            )
        members.append(Member(offset, count, share))
        offset += count
    return members
