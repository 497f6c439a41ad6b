"""Random data that a model can learn, for tests and benchmarks."""

from numbers import Integral
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Generator, Tensor

from modelzoo_trainer.base.constraints import NonNegativeSize, PositiveInt, Size, checked
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingOptions,
    ShuffleSeed,
    TensorRows,
)

Rows = tuple[Tensor, Tensor] | dict[str, Tensor]


class SyntheticProcessor(DataProcessor):
    """Generate learnable random batches; the same arguments give the same data everywhere.

    `classification`: `(inputs, labels)`, points around one center per class.
    `tokens`: `input_ids` and `labels`, where each token is one of two determined by its
    predecessor; the minimum loss is ln 2.

    Args:
        batch_size: Samples per batch and process, >= 1.
        global_batch_size: Samples per batch over all processes, a multiple of their number; give
            either this or `batch_size`.
        kind: Kind of data.
        num_samples: Number of samples per epoch, >= 1.
        seed: Seed of the samples. Classes and token rules are the same for every seed, so another
            seed gives validation data.
        num_features: `classification`: values per sample.
        num_classes: `classification`: number of classes.
        max_sequence_length: `tokens`: tokens per sample.
        vocab_size: `tokens`: vocabulary size, >= 2.
        shuffle: Whether to shuffle.
        shuffle_seed: Seed of the order.
        num_workers: Number of worker processes; 0 = load in the main process.
        drop_last: Whether to drop a smaller last batch.
        prefetch_factor: Batches that each worker prefetches.
        persistent_workers: Whether workers persist between epochs.

    Shapes:
        inputs: (B, num_features), float32. labels: (B,), int64; for tokens
        (B, max_sequence_length), int32, as input_ids.

    Raises:
        ConfigError: If a number is out of range.
    """

    @checked()
    def __init__(
        self,
        *,
        batch_size: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        kind: Literal["classification", "tokens"] = "classification",
        num_samples: Size = 1024,
        seed: int = 0,
        num_features: Size = 16,
        num_classes: Size = 4,
        max_sequence_length: Size = 32,
        vocab_size: Annotated[int, Ge(2), Integral] = 64,
        shuffle: bool = False,
        shuffle_seed: ShuffleSeed = 0,
        num_workers: NonNegativeSize = 0,
        drop_last: bool = False,
        prefetch_factor: Size | None = None,
        persistent_workers: bool = False,
    ) -> None:
        self.options = LoadingOptions(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            num_workers=num_workers,
            drop_last=drop_last,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._kind = kind
        self._seed = seed
        self._points = num_samples, num_features, num_classes
        self._tokens = num_samples, max_sequence_length + 1, vocab_size
        self.dataset = self.process(self.load())

    @event("load")
    def load(self) -> Rows:
        """Return the samples: tensors with one row each."""
        generator = Generator().manual_seed(self._seed)
        if self._kind == "classification":
            return _points(generator, *self._points)
        tokens = _tokens(generator, *self._tokens)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    @event("process")
    def process(self, rows: Rows) -> BatchDataset:
        """Return the dataset of these samples."""
        return TensorRows(rows)

    @classmethod
    def check_arguments(cls, **arguments: Any) -> list[str]:
        """Check the arguments without generating data; return what is missing here: nothing.

        Raises:
            ConfigError: If neither or both batch sizes are given.
        """
        LoadingOptions.check(arguments)
        return []


def _points(
    generator: Generator, num_samples: int, num_features: int, num_classes: int
) -> tuple[Tensor, Tensor]:
    centres = 2 * torch.randn(num_classes, num_features, generator=Generator().manual_seed(0))
    labels = torch.randint(num_classes, (num_samples,), generator=generator)
    noise = torch.randn(num_samples, num_features, generator=generator)
    return centres[labels] + noise, labels


def _tokens(generator: Generator, num_samples: int, length: int, vocab_size: int) -> Tensor:
    tokens = torch.randint(vocab_size, (num_samples, length), generator=generator)
    coins = torch.randint(2, (num_samples, length), generator=generator)
    for place in range(1, length):
        tokens[:, place] = (tokens[:, place - 1] * 5 + 1 + coins[:, place]) % vocab_size
    return tokens.int()
