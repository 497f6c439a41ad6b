"""Every kind of decoder, split and sharded over two processes, equals that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.engines import spread
from tests.distributed.ranks import run_ranks
from tests.distributed.test_tensor_parallel import SPLIT, learn, make_decoder
from tests.zoo.models.decoder_cases import CASES, NO_DROPOUT

ENGINES = {"split": SPLIT, "sharded": {"parallel": {"shard": -1}}}


def learn_spread(rank: int, case: str, options: dict[str, Any]) -> dict[str, Any]:
    kind, changes = CASES[case]
    model = make_decoder(kind, changes | NO_DROPOUT)
    spread(model, options)
    assert isinstance(model.layers[0].attention.k_proj.weight, DTensor)
    return learn(model)


# CI: one model of each kind split, as that is written for each kind; sharding is of any module:
# one model.
@pytest.mark.soak_cases(
    "qk norm*", "softcap, alibi-*", "falcon-*", "gptj-sharded", "gemma2-sharded"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt2"])
def test_a_decoder_of_two_processes_equals_one(case: str, engine: str) -> None:
    kind, changes = CASES[case]
    expected = learn(make_decoder(kind, changes | NO_DROPOUT))

    found = run_ranks(2, learn_spread, case, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-9, atol=1e-9)
