"""A checkpoint loaded by another number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from tests.distributed.launching import Workers, command, logged, told

NUM_STEPS, CUT = 24, 10
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
LAYOUTS = {"replicated": [], "sharded": ["init.backend.parallel={shard: -1}"]}
GLOBAL = ["fit.train_dataloader.batch_size=null", "fit.train_dataloader.global_batch_size=16"]
FEW = [(2, 1, "replicated"), (1, 2, "sharded")]
TRIALS = [
    *FEW,
    *(
        pytest.param(before, after, name, marks=SLOW if before != after else SOAK)
        for name in LAYOUTS
        for before in (1, 2, 4)
        for after in (1, 2, 4)
        if (before, after, name) not in FEW
    ),
]


def run(folder: Path, num: int, name: str, *changes: str) -> str:
    """Train with so many processes; return what was said that is more than information."""
    own = LAYOUTS[name] if num > 1 else []
    dropout = "init.model.dropout=0.0"
    words = command(folder, *GLOBAL, *own, dropout, *changes, "init.logging.log_steps=1")
    if num == 1:
        words += ["--set", "init.backend=null"]
    with Workers(folder.parent / "output", words, num=num) as workers:
        assert workers.codes() == [0] * num, workers.said
        return workers.said


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged(folder) if "loss" in line}


# CI: more and fewer processes, replicated and sharded, to one, from one, and between others.
@pytest.mark.soak_cases(
    "1-*", "2-1-sharded", "2-4-replicated", "4-1-*", "4-2-sharded", "!1-2-sharded"
)
@pytest.mark.slow_cases("1-2-sharded", "2-1-replicated")
@pytest.mark.parametrize(("before", "after", "name"), TRIALS)
def test_it_goes_on_with_the_same_weights_and_data_and_says_what_is_not_exact(
    tmp_path, count, before, after, name
) -> None:
    run(tmp_path / "whole", before, name)
    folder = tmp_path / "run"
    run(folder, before, name, f"init.loop.max_steps={CUT}", f"init.checkpoint.steps={CUT}")
    [saved] = checkpointing.list_checkpoints(folder)
    assert (saved.step, checkpointing.verify(saved.path)) == (CUT, [])
    said = run(folder, after, name)

    [_, begin] = [line for line in told(folder) if line[0] == "begin"]
    [digest] = {line[2] for line in told(folder) if line[:2] == ["step", str(CUT)]}
    assert begin == ["begin", str(CUT), digest]
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert len(losses(folder)) == NUM_STEPS
    if before == after:
        assert said == ""
        assert told(folder)[-2] == told(tmp_path / "whole")[-2]
    else:
        assert said.count("resumed run may differ") == 1
        assert f"was {before} at the checkpoint and is now {after}" in said
    count(trials=1, unequal=int(begin[2] != digest))
