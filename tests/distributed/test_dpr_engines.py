"""Dense passage retrieval, split and sharded over two processes, equals that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from modelzoo_trainer.zoo.models.bert.dpr import Dpr
from tests.distributed.engines import spread, two_steps
from tests.distributed.ranks import run_ranks
from tests.distributed.test_bert_engines import ENGINES
from tests.zoo.models.bert_cases import NO_DROPOUT, SIZES
from tests.zoo.models.test_dpr import batch


def make() -> Dpr:
    torch.manual_seed(3)
    settings = {**SIZES, **NO_DROPOUT}
    return Dpr(q_encoder=settings, ctx_encoder=settings, pooler_type="ffn_pooler").double()


def learn(model: Dpr) -> dict[str, Any]:
    return two_steps(model, batch())


def learn_spread(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    model = make()
    spread(model, options)
    assert model.ctx_encoder is not None
    assert isinstance(model.ctx_encoder.layers[0].attention.k_proj.weight, DTensor)
    return learn(model)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_equal_one(engine: str) -> None:
    expected = learn(make())

    found = run_ranks(2, learn_spread, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)
