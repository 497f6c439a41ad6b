"""The number of batches of a validation, over all ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.loading.train_data import num_validation_batches


@pytest.mark.parametrize(
    ("num_ranks", "limit", "num"), [(1, None, 10), (1, 3, 3), (4, None, 3), (4, 5, 3), (4, 2, 2)]
)
@pytest.mark.parametrize("is_list", [True, False])
def test_batches_are_counted_over_all_ranks(is_list, num_ranks, limit, num):
    backend = SimpleNamespace(comm=SimpleNamespace(data_shard=(0, num_ranks)))
    rows = torch.zeros(10, 2)
    loader = [rows[:1]] * 10 if is_list else DataLoader(rows, batch_size=1)
    assert num_validation_batches(loader, backend, limit) == num


@pytest.mark.parametrize("limit", [None, 7])
def test_an_unknown_length_is_the_limit(limit):
    backend = SimpleNamespace(comm=SimpleNamespace(data_shard=(0, 4)))
    assert num_validation_batches(lambda: iter(()), backend, limit) == limit
