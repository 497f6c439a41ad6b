"""The random numbers of a batch depend on run, epoch and position alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from modelzoo_trainer.loading.batch_dataset import BatchDataset, already_a_batch
from modelzoo_trainer.loading.batch_seeds import (
    SeededDataset,
    collates_plainly,
    draws_nothing,
    mixed,
    seed_generators,
)


class Drawing(Dataset):
    """Its samples are numbers of python's, numpy's and torch's generators."""

    def __getitem__(self, idx):
        return idx, random.random(), float(np.random.rand()), float(torch.rand(()))

    def __len__(self):
        return 10


class Batches(BatchDataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return [(idx, random.random()) for idx in indices]


class Each(Drawing):
    seed_each_sample = True


def test_a_batch_is_the_same_whatever_was_drawn_before() -> None:
    data = SeededDataset(Drawing())
    first = data.__getitems__(([1, 2, 3], 7, 20, 0))
    random.random(), np.random.rand(), torch.rand(())
    assert data.__getitems__(([1, 2, 3], 7, 20, 0)) == first
    assert data.__getitems__(([1, 2, 3], 7, 21, 0)) != first
    assert data.__getitems__(([1, 2, 3], 8, 20, 0)) != first
    drawn = [number for _, *numbers in first for number in numbers]
    assert len(set(drawn)) == len(drawn)


def test_one_sample_that_is_no_batch_is_seeded_by_its_position() -> None:
    data = SeededDataset(Drawing())
    first = data[(3, 7, 20, 0)]
    assert data[(3, 7, 20, 0)] == first != data[(3, 7, 21, 0)]


def test_a_data_set_may_ask_for_seeds_of_each_sample() -> None:
    data = SeededDataset(Each())
    first = data.__getitems__(([1, 2, 3], 7, 20, 0))
    assert data.__getitems__(([3], 7, 22, 0)) == first[2:]
    assert data.__getitems__(([3, 3], 7, 22, 0))[0] == first[2]
    assert data.__getitems__(([3, 3], 7, 22, 0))[1] != first[2]


def test_an_index_need_not_be_a_number() -> None:
    data = SeededDataset({"a": Drawing(), "b": 2})
    assert data.__getitems__((["b"], 7, 3, 0)) == [2]
    assert data[("b", 7, 3, 0)] == 2


def test_a_data_set_of_whole_batches_is_seeded_once_a_batch() -> None:
    data = SeededDataset(Batches())
    first = data.__getitems__(([4, 5], 7, 0, 0))
    random.random()
    assert data.__getitems__(([4, 5], 7, 0, 0)) == first
    assert first[0][1] != first[1][1]


def test_set_epoch_of_a_data_set_is_called_once_an_epoch() -> None:
    epochs = []

    class Told(Drawing):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    data = SeededDataset(Told())
    for epoch in (3, 3, 4):
        data.__getitems__(([1], 7, 0, epoch))
    assert epochs == [3, 4]


TENSORS = TensorDataset(torch.arange(4))


class Own(TensorDataset):
    pass


class Noisy(Batches):
    draws_numbers = True


@pytest.mark.parametrize(
    ("dataset", "is_quiet"),
    [
        (TENSORS, True),
        (torch.arange(3), True),
        ([1, 2], True),
        (Subset(TENSORS, [1]), True),
        (ConcatDataset([TENSORS, Subset(TENSORS, [0])]), True),
        (Batches(), True),
        (Noisy(), False),
        (Drawing(), False),
        (Own(torch.arange(4)), False),
        (Subset(Drawing(), [1]), False),
        (ConcatDataset([TENSORS, Drawing()]), False),
    ],
)
def test_data_sets_that_are_known_to_draw_nothing_are_left_alone(dataset, is_quiet) -> None:
    assert draws_nothing(dataset) == is_quiet


def test_only_known_collations_draw_nothing() -> None:
    assert collates_plainly(default_collate)
    assert collates_plainly(already_a_batch)
    assert not collates_plainly(lambda samples: samples)


def test_seeds_are_far_apart_and_all_generators_get_them() -> None:
    seeds = {
        mixed(base, number, more) for base in range(9) for number in range(9) for more in (0, 1)
    }
    assert len(seeds) == 162
    assert all(0 <= seed < 2**62 for seed in seeds)
    seed_generators(5)
    first = random.random(), np.random.rand(), torch.rand(()).item()
    seed_generators(5)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == first
