"""Size of a batch."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of

ROWS = torch.zeros(5, 2)


@pytest.mark.parametrize(
    "batch",
    [
        ROWS,
        (ROWS, torch.zeros(5)),
        [ROWS],
        {"input_ids": ROWS},
        {"name": "text", "step": torch.tensor(3), "inner": [{"x": ROWS}]},
        (torch.tensor(1.0), ROWS),
    ],
)
def test_it_is_the_first_dimension_of_the_first_tensor_that_has_one(batch: Any) -> None:
    assert batch_size_of(batch) == 5


def test_it_needs_no_values() -> None:
    assert batch_size_of({"x": torch.zeros(7, device="meta")}) == 7


@pytest.mark.parametrize(
    ("batch", "kind"), [("text", "str"), ({}, "dict"), ((torch.tensor(1),), "tuple")]
)
def test_a_batch_without_such_a_tensor_is_refused(batch: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"batch of type {kind}"):
        batch_size_of(batch)
