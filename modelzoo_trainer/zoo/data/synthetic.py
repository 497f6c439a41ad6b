"""Random data that a model can learn, for tests and benchmarks."""

from numbers import Integral
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Generator, Tensor
from typing_extensions import override

from modelzoo_trainer.base.constraints import Size, checked_dataclass
from modelzoo_trainer.hooks.interceptors import event
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingArguments,
    TensorRows,
)
from modelzoo_trainer.zoo.data.sample_features import Feature, Features, rows_of

Rows = tuple[Tensor, Tensor] | dict[str, Tensor]


@checked_dataclass(kw_only=True)
class SyntheticProcessor(LoadingArguments, DataProcessor):
    """Generate learnable random batches; the same arguments give the same data everywhere.

    `classification`: `(inputs, labels)`, points around one center per class.
    `tokens`: `input_ids` and `labels`, where each token is one of two determined by its
    predecessor; the minimum loss is ln 2.

    Args:
        kind: Kind of data.
        num_samples: Number of samples per epoch, >= 1.
        seed: Seed of the samples. Classes and token rules are the same for every seed, so another
            seed gives validation data.
        num_features: `classification`: values per sample.
        num_classes: `classification`: number of classes.
        max_sequence_length: `tokens`: tokens per sample.
        vocab_size: `tokens`: vocabulary size, >= 2.

    Shapes:
        inputs: (B, num_features), float32. labels: (B,), int64; for tokens
        (B, max_sequence_length), int32, as input_ids.

    Raises:
        ConfigError: If a number is out of range.
    """

    kind: Literal["classification", "tokens"] = "classification"
    num_samples: Size = 1024
    seed: int = 0
    num_features: Size = 16
    num_classes: Size = 4
    max_sequence_length: Size = 32
    vocab_size: Annotated[int, Ge(2), Integral] = 64

    def __post_init__(self) -> None:
        self.options = self.loading_options()
        self.dataset = self.process(self.load())

    @event("load")
    def load(self) -> Rows:
        """Return the samples: tensors with one row each."""
        generator = Generator().manual_seed(self.seed)
        if self.kind == "classification":
            return _points(generator, self.num_samples, self.num_features, self.num_classes)
        tokens = _tokens(generator, self.num_samples, self.max_sequence_length + 1, self.vocab_size)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    @event("process")
    def process(self, rows: Rows) -> BatchDataset:
        """Return the dataset of these samples."""
        return TensorRows(rows)

    @override
    def sample_features(self, model: Any) -> Features:
        if self.kind == "tokens":
            return rows_of(("input_ids", "labels"), self.max_sequence_length)
        return Feature((self.num_features,), torch.float32), Feature((), torch.int64)


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
