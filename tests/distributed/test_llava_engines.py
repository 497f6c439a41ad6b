"""Decoders that see images, split and sharded over two processes, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.engines import spread, two_steps
from tests.distributed.ranks import run_ranks
from tests.zoo.models import llava_cases

ENGINES: dict[str, dict[str, Any]] = {
    "split": {"parallel": {"tensor": -1}},
    "split, positions": {"parallel": {"tensor": -1}, "sequence_parallel": True},
    "sharded": {"parallel": {"shard": -1}},
}
FROZEN = ["^image_model", "^text_model"]


def make(case: str) -> tuple[Any, dict[str, Any]]:
    """Return a model and its batch."""
    if case == "several images":
        model, batch = llava_cases.make_simple(), llava_cases.simple_batch()
    else:
        freeze = FROZEN if case == "only the projector" else None
        model, batch = llava_cases.make(freeze=freeze), llava_cases.batch_of()
    batch["image_data"] = batch["image_data"].double()
    return model.double(), batch


def learn_spread(rank: int, case: str, options: dict[str, Any]) -> dict[str, Any]:
    model, batch = make(case)
    spread(model, options)
    assert isinstance(model.text_model.layers[0].attention.k_proj.weight, DTensor)
    return two_steps(model, batch)


# CI: one model of each kind split, as that is written for each kind; sharding is of any module:
# one model.
@pytest.mark.soak_cases(
    "*-sharded", "only*positions", "several images-*", "!only the projector-sharded"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["everything", "only the projector", "several images"])
def test_two_processes_equal_one(case: str, engine: str) -> None:
    expected = two_steps(*make(case))

    found = run_ranks(2, learn_spread, case, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)
