"""From text to rows of tokens to a trained llama: two sharded processes equal one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.text_to_model import arguments, validation_losses, write_corpus, write_rows
from tests.distributed.launching import Workers

NUM_STEPS = 20
VOCAB_SIZES = {"bytes": 257, "bpe": 600}
SMALL = [
    "init.model.num_hidden_layers=2",
    "init.model.hidden_size=64",
    "init.model.num_heads=4",
    "init.model.rotary_dim=16",
    "init.model.filter_size=176",
    "init.schedulers=[]",
    "init.optimizer.AdamW.lr=0.003",
    "fit.train_dataloader.batch_size=8",
    "fit.val_dataloader.batch_size=6",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", VOCAB_SIZES)
def test_two_sharded_processes_learn_text_as_one_does(tmp_path: Path, kind: str) -> None:
    size = VOCAB_SIZES[kind]
    write_corpus(tmp_path, size, max_bytes=300_000)
    write_rows(tmp_path, 64)
    found = {}
    for num in (1, 2):
        words = arguments(f"run_{num}", NUM_STEPS, [*SMALL, f"init.model.vocab_size={size}"])
        with Workers(tmp_path / f"said_{num}", words, num, place=lambda _: tmp_path) as workers:
            assert workers.codes() == [0] * num, workers.said
            assert ("Training FSDPGpt2" in workers.said) == (num == 2)
        found[num] = validation_losses(tmp_path / f"run_{num}")

    assert len(found[1]) == NUM_STEPS
    assert found[1][-1] < found[1][0] - 0.7
    assert found[2] == pytest.approx(found[1], rel=0, abs=1e-5)
