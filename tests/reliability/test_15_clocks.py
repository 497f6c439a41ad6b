"""File times shuffled and the clock set back: the same checkpoint is the newest."""

from __future__ import annotations

import os
import random
import time

import pytest

from modelzoo_trainer import Checkpoint
from tests.doubles import differing, make_trainer, tiny_batches, weights_of


def trained(folder, steps: int):
    trainer = make_trainer(folder, checkpoint=Checkpoint(steps=1), max_steps=steps)
    trainer.fit(tiny_batches(4))
    trainer.close()
    return trainer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow_cases(every=4)
def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path, count, monkeypatch, seed):
    expected = weights_of(trained(tmp_path / "unbroken", 14))
    folder = tmp_path / "run"
    trained(folder, 11)
    generator = random.Random(seed)
    for path in folder.rglob("*"):
        moment = generator.uniform(0, 4e9)
        os.utime(path, (moment, moment), follow_symlinks=False)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86_400 * 365)
    trainer = make_trainer(folder, checkpoint=Checkpoint(steps=1), max_steps=14)
    assert trainer.checkpoint.get_latest_checkpoint(trainer).name == "checkpoint_11"
    trainer.fit(tiny_batches(4))
    trainer.close()
    assert differing(weights_of(trainer), expected) == []
    assert trainer.checkpoint.get_latest_checkpoint(trainer).name == "checkpoint_14"
    count(trials=1)
