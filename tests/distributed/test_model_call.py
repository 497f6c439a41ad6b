"""A model that takes its batch apart learns the same in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from modelzoo_trainer import Trainer, TrainingLoop
from tests.distributed.ranks import run_ranks
from tests.doubles import TinyModel


class Apart(TinyModel):
    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return super().forward((inputs, targets))


def learn(rank: int, folder: Path, backend: Any, kind: str) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    pairs = [
        (torch.randn(3, generator=generator), torch.randn(1, generator=generator))
        for _ in range(10)
    ]
    named = [{"inputs": inputs, "targets": targets} for inputs, targets in pairs]
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder / kind,
        model=TinyModel if kind == "model(batch)" else Apart,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_epochs=2),
        seed=1,
    )
    data: Any = named if kind == "model(**batch)" else pairs
    trainer.fit(DataLoader(data, 2), DataLoader(data, 2))
    logits = trainer.predict(DataLoader(data, 2))["logits"]
    assert trainer.model_call == kind
    state = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    return [logits.tolist(), *(state[name].tolist() for name in sorted(state))]


def learn_by_each_call(rank: int, folder: Path, backend: Any) -> list[list[Any]]:
    kinds = ("model(batch)", "model(*batch)", "model(**batch)")
    return [learn(rank, folder, backend, kind) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [{}, {"parallel": {"shard": 2}}], ids=["replicate", "shard"])
def test_the_call_does_not_change_what_is_learnt(tmp_path, backend) -> None:
    for first, *others in run_ranks(2, learn_by_each_call, tmp_path, backend):
        assert others == [first, first]
