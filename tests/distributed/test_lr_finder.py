"""The learning-rate range test in several processes: one curve, and nothing left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.callbacks import LRFinder
from tests.distributed.ranks import run_ranks
from tests.distributed.test_attribute_states import ENGINES, make
from tests.distributed.training import samples

pytestmark = pytest.mark.slow


def train(rank: int, folder: Path, backend: Any, batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    weights, finder = [], LRFinder(start_lr=1e-5, end_lr=1.0, num_steps=12)
    for name, callbacks in (("plain", ()), ("tested", (finder,))):
        with make(folder / name, 3, backend, callbacks=callbacks) as trainer:
            trainer.fit(DataLoader(samples(22), batch_size=batch_size))
            state = trainer.backend.host_state(dict(trainer.model.state_dict()))
            weights.append({key: value.tolist() for key, value in state.items()})
            is_written = (trainer.artifact_dir / "lr_finder.csv").exists()
    return weights[0] == weights[1], finder.losses, is_written


@pytest.mark.parametrize("name", ["replicated", "sharded", "drawn late"])
def test_nothing_is_left_and_all_processes_have_one_curve(tmp_path, name) -> None:
    found = run_ranks(2, train, tmp_path, ENGINES[name], 2)
    assert [same for same, _, _ in found] == [True, True]
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 12
    if name == "drawn late":  # which draws other weights
        return
    alone = train(0, tmp_path / "alone", None, 4)[1]
    num = len(samples(22)) // 4  # after which the batches of one epoch are not the same
    assert found[0][1][:num] == pytest.approx(alone[:num], rel=1e-4)
