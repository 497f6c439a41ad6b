"""Vision transformers, split and sharded over two processes, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from modelzoo_trainer.zoo.models.vision.classifier import Vit
from tests.distributed.engines import spread, two_steps
from tests.distributed.ranks import run_ranks
from tests.zoo.models.vit_cases import CASES, NO_DROPOUT, batch_of, make

ENGINES = {"split": {"parallel": {"tensor": -1}}, "sharded": {"parallel": {"shard": -1}}}


def learn(model: Vit) -> dict[str, Any]:
    images, labels = batch_of()
    return two_steps(model, (images.double(), labels))


def learn_spread(rank: int, case: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(case, **NO_DROPOUT).double()
    spread(model, options)
    assert isinstance(model.encoder.layers[0].attention.k_proj.weight, DTensor)
    return learn(model)


# CI: one model of each kind split, as that is written for each kind; sharding is of any module:
# one model.
@pytest.mark.soak_cases(
    "vit-sharded",
    "conv, pooler-*",
    "stochastic depth-*",
    "dino-split",
    "post-norm, gated, fixed-sharded",
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_two_processes_equals_one(case: str, engine: str) -> None:
    expected = learn(make(case, **NO_DROPOUT).double())

    found = run_ranks(2, learn_spread, case, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)
