"""The random numbers of a sample depend on run, pass and index alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from modelzoo_trainer.data.processor import BatchDataset, already_a_batch
from modelzoo_trainer.loading.per_sample import (
    Indices,
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


def test_a_sample_is_the_same_in_any_batch() -> None:
    data = SeededDataset(Drawing(), each=True)
    first = data.__getitems__(Indices([1, 2, 3], 7, 0, None))
    second = data.__getitems__(Indices([3], 7, 0, None))
    assert second == first[2:]
    assert data[Indices(3, 7, 0, None)] == first[2]


def test_samples_and_passes_have_numbers_of_their_own() -> None:
    data = SeededDataset(Drawing(), each=True)
    one, two = data.__getitems__(Indices([1, 2], 7, 0, None))
    [again] = data.__getitems__(Indices([1], 8, 1, None))
    assert len({one[1:], two[1:], again[1:]}) == 3


def test_a_sample_that_comes_twice_has_other_numbers_the_second_time() -> None:
    data = SeededDataset(Drawing(), each=True)
    first, second = data.__getitems__(Indices([4, 4], 7, 0, 20))
    [elsewhere] = data.__getitems__(Indices([4], 7, 0, 21))
    assert first != second
    assert elsewhere == second


def test_an_index_need_not_be_a_number() -> None:
    data = SeededDataset({"a": Drawing(), "b": 2}, each=True)
    assert data.__getitems__(Indices(["b"], 7, 0, 3)) == [2]
    assert data[Indices("b", 7, 0, 3)] == 2


def test_indices_of_numpy_and_torch_count_as_numbers() -> None:
    plain = Indices([], 7, 0, None).seed_of(0, 5)
    assert Indices([], 7, 0, None).seed_of(0, np.int64(5)) == plain
    assert Indices([], 7, 0, None).seed_of(0, torch.tensor(5)) == plain


def test_a_data_set_of_whole_batches_is_seeded_once_a_batch() -> None:
    data = SeededDataset(Batches(), each=True)
    first = data.__getitems__(Indices([4, 5], 7, 0, None))
    random.random()
    assert data.__getitems__(Indices([4, 5], 7, 0, None)) == first
    assert first[0][1] != first[1][1]


def test_a_collation_that_draws_is_seeded_once_a_batch() -> None:
    data = SeededDataset([10, 11, 12], each=False)
    assert data.__getitems__(Indices([2, 0], 7, 0, None)) == [12, 10]
    drawn = random.random()
    data.__getitems__(Indices([2, 1], 7, 0, None))
    assert random.random() == drawn


def test_a_data_set_is_told_of_a_new_pass_once() -> None:
    epochs = []

    class Told(Drawing):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    data = SeededDataset(Told(), each=True)
    for epoch in (3, 3, 4):
        data.__getitems__(Indices([1], 7, epoch, None))
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
