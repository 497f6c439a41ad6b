"""Data made of random numbers that a model can learn: for tests and measurements."""

from numbers import Integral
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Generator, Tensor

from modelzoo_trainer.constraints import NonNegativeSize, PositiveInt, Size, checked
from modelzoo_trainer.data.processor import (
    BatchDataset,
    DataProcessor,
    LoadingOptions,
    ShuffleSeed,
    TensorRows,
)
from modelzoo_trainer.interceptors import event

Rows = tuple[Tensor, Tensor] | dict[str, Tensor]


class SyntheticProcessor(DataProcessor):
    """Batches of one of two kinds; the same arguments give the same data everywhere.

    `classification`: `(inputs, labels)`, points around one centre for each class.
    `tokens`: `input_ids` and `labels`, where each token is one of two that its predecessor
    determines; the best loss is ln 2.

    Args:
        batch_size: Samples a batch of each process, >= 1.
        global_batch_size: Samples a batch of all processes together, which their number divides;
            either this or `batch_size`.
        kind: Which one.
        num_samples: Number of samples in an epoch, >= 1.
        seed: Determines all values. The classes and the rule of the tokens are the same for
            every seed, so that another seed is data for validation.
        num_features: `classification`: values in a sample.
        num_classes: `classification`: number of classes.
        max_sequence_length: `tokens`: tokens in a sample.
        vocab_size: `tokens`: number of different ones, >= 2.
        shuffle: Whether the order is random.
        shuffle_seed: Determines that order.
        num_workers: Processes that load; 0 loads in this one.
        drop_last: Whether a smaller last batch is dropped.
        prefetch_factor: Batches that each worker holds ready.
        persistent_workers: Whether workers live on between epochs.

    Shapes:
        inputs: (B, num_features), float32. labels: (B,), int64; of tokens
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
        """Return the data set of these samples."""
        return TensorRows(rows)

    @classmethod
    def check_arguments(cls, **arguments: Any) -> list[str]:
        """Check the constructor's arguments, nothing made; return what this machine lacks: nothing.

        Raises:
            ConfigError: If not one of the two batch sizes is given.
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
