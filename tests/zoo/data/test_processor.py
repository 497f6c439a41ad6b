"""Loaders of data processors: how samples become batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_dataset import already_a_batch
from modelzoo_trainer.zoo.data import BatchDataset, DataProcessor, LoadingOptions, TensorRows
from tests.doubles import differing, weights_of

INPUTS = torch.arange(24.0).view(8, 3)
TARGETS = INPUTS.sum(1, keepdim=True)


class Samples(Dataset[Any]):
    """A dataset of single samples."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], TARGETS[index]


class SeveralSamples(Samples):
    """As torch's protocol has it, and the datasets of Hugging Face."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


class WholeBatches(Samples):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return INPUTS[indices], TARGETS[indices]


class ListOfTensors(BatchDataset):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [INPUTS[index], TARGETS[index]]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [INPUTS[indices], TARGETS[indices]]


class Processor(DataProcessor):
    def __init__(self, dataset: Any, collate_fn: Any = None, **options: Any) -> None:
        self.options = LoadingOptions(**{"batch_size": 2, **options})
        self.dataset = dataset
        if collate_fn is not None:
            self.collate_fn = collate_fn


ROWS = TensorRows((INPUTS, TARGETS))
IN_TURN = range(8)


@pytest.mark.parametrize(
    "dataset",
    [
        Samples(),
        SeveralSamples(),
        WholeBatches(),
        ListOfTensors(),
        ROWS,
        Subset(Samples(), IN_TURN),
        Subset(ROWS, IN_TURN),
        Subset(Subset(ListOfTensors(), IN_TURN), IN_TURN),
        ConcatDataset([Subset(ROWS, range(4)), Subset(ROWS, range(4, 8))]),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_a_dataset_of_any_kind_gives_batches(dataset) -> None:
    batches = list(Processor(dataset).create_dataloader())
    assert len(batches) == 4
    assert [len(batch) for batch in batches] == [2] * 4
    assert torch.cat([batch[0] for batch in batches]).equal(INPUTS)
    assert torch.cat([batch[1] for batch in batches]).equal(TARGETS)


def test_the_batches_of_a_batch_dataset_stay_as_they_are() -> None:
    assert Processor(ROWS).create_dataloader().collate_fn is already_a_batch


@pytest.mark.parametrize("dataset", [Samples(), SeveralSamples()])
def test_single_samples_train_as_whole_batches_do(trainer_of, tmp_path, dataset) -> None:
    found = []
    for name, data in (("rows", ROWS), ("samples", dataset)):
        trainer = trainer_of(model_dir=tmp_path / name)
        loader = Processor(data, shuffle=True, shuffle_seed=3).create_dataloader()
        trainer.fit(loader, Processor(data, batch_size=4).create_dataloader())
        found.append(weights_of(trainer))
    assert differing(*found) == []


def tripled(samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    return 3 * torch.stack([inputs for inputs, _ in samples])


class WithMethod(Processor):
    def collate_fn(self, samples: Any) -> Any:
        return tripled(samples)


@pytest.mark.parametrize(
    "processor", [Processor(Samples(), tripled), WithMethod(Samples())], ids=["attribute", "method"]
)
def test_a_collate_function_of_the_processor_is_used(processor) -> None:
    assert torch.cat(list(processor.create_dataloader())).equal(3 * INPUTS)


def test_a_stream_is_refused_with_what_to_do() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ConfigError, match=r"Stream, an IterableDataset.*create_dataloader"):
        Processor(Stream()).create_dataloader()
