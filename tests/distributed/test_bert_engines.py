"""BERT, split and sharded over two processes, equals that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks
from tests.zoo.models.bert_cases import CASES, NO_DROPOUT, batch_of, make

ENGINES = {"split": {"parallel": {"tensor": -1}}, "sharded": {"parallel": {"shard": -1}}}


def learn(model: Bert, case: str) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    batch = batch_of(CASES[case], gathers=True)
    for _ in range(2):
        outputs = model(batch)
        losses.append(outputs["loss"].item())
        outputs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {name: whole(param).numpy() for name, param in model.named_parameters()},
    }


def learn_spread(rank: int, case: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(case, **NO_DROPOUT).double()
    spread(model, options)
    assert isinstance(model.encoder.layers[0].attention.k_proj.weight, DTensor)
    return learn(model, case)


# CI: one model of each kind split, as that is written for each kind; sharding is of any module:
# one model.
@pytest.mark.soak_cases("roberta-*", "pre-norm, rotary-*", "alibi-*", "esm2-*", "bert-sharded")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_bert_of_two_processes_equals_one(case: str, engine: str) -> None:
    expected = learn(make(case, **NO_DROPOUT).double(), case)

    found = run_ranks(2, learn_spread, case, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)
