"""DataLoaders of data processors: sample order and common options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self, cast

import torch
from annotated_types import Lt
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from modelzoo_trainer.base.constraints import NonNegativeSize, PositiveInt, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import Interceptable, event
from modelzoo_trainer.loading.batch_dataset import BatchDataset, already_a_batch, collate_samples
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.zoo.data.sample_features import Features

ShuffleSeed = Annotated[NonNegativeSize, Lt(2**63)]


@checked_dataclass(kw_only=True)
class LoadingArguments:
    """How samples are batched and loaded: arguments that data processors share.

    Args:
        batch_size: Samples per batch and process, >= 1.
        global_batch_size: Samples per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        shuffle: Whether to shuffle.
        shuffle_seed: Seed of the order.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether to drop a smaller last batch.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.
    """

    batch_size: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None
    shuffle: bool = False
    shuffle_seed: ShuffleSeed = 0
    num_workers: NonNegativeSize = 0
    drop_last: bool = False
    prefetch_factor: Size | None = None
    persistent_workers: bool = False

    def loading_options(self, *, reshuffle: bool = True) -> LoadingOptions:
        """Return them as options; `reshuffle`: whether each epoch has its own order.

        Raises:
            ConfigError: If neither or both batch sizes are given.
        """
        given = {one.name: getattr(self, one.name) for one in fields(LoadingArguments)}
        return LoadingOptions(**given, reshuffle=reshuffle)


@checked_dataclass(kw_only=True)
class LoadingOptions(LoadingArguments):
    """How samples are batched and loaded.

    Args:
        drop_last: Whether to drop a smaller last batch, so that all have the same shape.
        prefetch_factor: Batches that each worker prefetches; no effect without workers.
        persistent_workers: Whether workers persist between epochs; no effect without workers.
        reshuffle: Whether each epoch has its own order.

    Raises:
        ConfigError: If a number is out of range, or neither or both batch sizes are given.
    """

    reshuffle: bool = True

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.global_batch_size is None):
            given = "neither is set" if self.batch_size is None else "both are set"
            raise ConfigError(
                f"batch_size and global_batch_size: {given}. Set one of them: batch_size is per "
                f"process, global_batch_size over all processes."
            )

    @property
    def num_drawn(self) -> int:
        """Samples that the loader draws per batch."""
        size = self.batch_size if self.global_batch_size is None else self.global_batch_size
        assert size is not None  # checked in the constructor
        return size

    @property
    def size_name(self) -> str:
        """Name of the batch size argument that is given."""
        return "batch_size" if self.global_batch_size is None else "global_batch_size"


def make_dataloader(
    dataset: Dataset[Any],
    options: LoadingOptions,
    collate_fn: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader of a dataset with `__getitem__` and `__len__`.

    With `global_batch_size` it has `is_global_batch` set: each process takes a slice of a batch.

    `collate_fn`: None = torch's; the batches of a `BatchDataset` stay as they are.

    Raises:
        ConfigError: If there is not one full batch, and smaller ones are dropped, or if it is an
            `IterableDataset`.
    """
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"dataset is {type(dataset).__name__}, an IterableDataset, but a DataProcessor "
            f"requires a dataset with __getitem__ and __len__. Instead of a DataProcessor, write a "
            f"class with a method create_dataloader that returns a DataLoader."
        )
    num_samples = len(cast(Sized, dataset))
    if options.drop_last and num_samples < options.num_drawn:
        name = options.size_name
        raise ConfigError(
            f"{name} is {options.num_drawn}, but there are only {num_samples} samples, and with "
            f"drop_last the incomplete batch is dropped. Decrease {name}, or set drop_last: false."
        )
    has_workers = options.num_workers > 0
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=options.num_drawn,
        sampler=_sampler(cast(Sized, dataset), options),
        num_workers=options.num_workers,
        drop_last=options.drop_last,
        collate_fn=collate_fn or _collation_of(dataset),
        prefetch_factor=options.prefetch_factor if has_workers else None,
        persistent_workers=options.persistent_workers and has_workers,
        # Not the global generator: iterators draw from it, and dropout must not depend on them.
        generator=torch.Generator().manual_seed(options.shuffle_seed),
    )
    if options.global_batch_size is not None:
        loader.is_global_batch = True  # each process takes a slice
    return loader


def _collation_of(dataset: Any) -> Callable[[Any], Any]:
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if isinstance(inner, BatchDataset):
        return already_a_batch
    # `__getitems__` returns a list of samples in torch's protocol, or a whole batch.
    return collate_samples if hasattr(dataset, "__getitems__") else default_collate


def _sampler(dataset: Sized, options: LoadingOptions) -> Sampler[int]:
    if not options.shuffle:
        return SequentialSampler(dataset)
    return SeededSampler(len(dataset), seed=options.shuffle_seed, reshuffle=options.reshuffle)


class TensorRows(BatchDataset):
    """A dataset of tensors: row i of every tensor is sample i.

    Args:
        tensors: All with the same first dimension; a batch has the same structure (a tuple, or a
            mapping with these keys).
    """

    def __init__(self, tensors: tuple[Tensor, ...] | Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        tensors = self.tensors
        first = tensors[0] if isinstance(tensors, tuple) else next(iter(tensors.values()))
        return first.shape[0]

    def __getitem__(self, index: int) -> Any:
        return self._rows(index)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        return self._rows(indices)

    def _rows(self, which: int | list[int]) -> Any:
        if isinstance(self.tensors, tuple):
            return tuple(tensor[which] for tensor in self.tensors)
        return {key: tensor[which] for key, tensor in self.tensors.items()}


class DataProcessor(Interceptable):
    """Base class of data processors: a DataLoader of a dataset, with the options of all processors.

    The constructor of a subclass sets these attributes:

    * `options`, a `LoadingOptions`: batch size, order, workers.
    * `dataset`: a dataset with `__len__` and `__getitem__`, which returns one sample. Samples are
      collated by torch's `default_collate`. A `TensorRows`, or another `BatchDataset`, returns
      whole batches, which is faster.
    * `collate_fn`, only if samples are to be collated in another way: a function that gets a list
      of samples and returns the batch. It may also be a method of the class.

    The steps of a constructor are events of the class: to add interceptors, give the class a list
    `callbacks`, or call it as `Class.with_functions(("post-load", f))(...)`.
    """

    model_lengths: ClassVar[Mapping[str, str]] = {}
    """Arguments of the constructor that, left out, are the named attribute of the model."""
    options: LoadingOptions
    dataset: Dataset[Any]
    collate_fn: Callable[[Any], Any] | None = None

    @classmethod
    def lengths_from_model(cls, arguments: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the arguments that a call may omit if the model has a length, and its attribute.

        `arguments`: the call's.
        """
        del arguments
        return cls.model_lengths

    @classmethod
    def check_arguments(cls, **arguments: Any) -> list[str]:
        """Check the arguments of a dataclass; return what is missing on this machine.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        unopened = cls.unopened(**arguments)
        if isinstance(unopened, LoadingArguments):
            unopened.loading_options()
        return unopened.missing()

    @classmethod
    def unopened(cls, **arguments: Any) -> Self:
        """Return an instance of a dataclass with its arguments, whose constructor has not run."""
        made = object.__new__(cls)
        known: Any = cls
        vars(made).update({one.name: one.default for one in fields(known) if one.init})
        vars(made).update(arguments)
        return made

    def sample_features(self, model: Any) -> Features | None:
        """Return shapes and types of a sample's tensors without reading data, for `plan`.

        None, the default, if only the data show them. The instance is `unopened`.

        `model`: whose lengths and settings samples follow.

        Raises:
            ConfigError: If an argument is missing that they follow from.
        """
        del model
        return None

    def missing(self) -> list[str]:
        """Check the arguments without reading data; return what is missing on this machine.

        Batch sizes are checked before, and the types of all arguments.

        Raises:
            ConfigError: If an argument is invalid, or arguments exclude each other.
        """
        return []

    @event("create-dataloader")
    def create_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the samples."""
        return make_dataloader(self.dataset, self.options, self.collate_fn)
