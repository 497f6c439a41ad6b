"""A signal during a collective that waits for another process: it stops at the step boundary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing

BLOCKED_S = 1.5
PROGRAM = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from tests.reliability.program import Plan, loaders_of, trainer_of
from modelzoo_trainer import Callback

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(str(folder / "store"), 2)
group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=180))


class Collective(Callback):
    def on_before_forward(self, trainer, model, batch, args, kwargs):
        if trainer.global_step == 5:
            (folder / "blocked").touch()
            group.barrier().wait()


if rank == 1:
    while not (folder / "go").exists():
        time.sleep(0.01)
    group.barrier().wait()
else:
    plan = Plan(folder=str(folder / "run"), every=1000, validate=False)
    trainer = trainer_of(plan)
    trainer.raise_on_interrupt = False
    with Collective():
        trainer.fit(*loaders_of(plan))
    sys.exit({"SIGTERM": 143, "SIGUSR1": 143, "SIGINT": 130}[trainer.interrupted])
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 180  # two processes import torch
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130)])
def test_a_signal_during_a_blocked_collective_is_heeded_at_the_boundary(
    tmp_path, count, name, code
) -> None:
    root = Path(__file__).resolve().parents[2]
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    run, peer = (
        subprocess.Popen([sys.executable, str(path), str(tmp_path), str(rank)], env=env)
        for rank in range(2)
    )
    wait_for(tmp_path / "blocked")
    run.send_signal(getattr(signal, name))
    time.sleep(BLOCKED_S)
    assert run.poll() is None  # the collective goes on
    begin = time.monotonic()
    (tmp_path / "go").touch()
    assert run.wait(60) == code
    assert peer.wait(60) == 0
    [found] = checkpointing.list_checkpoints(tmp_path / "run")
    assert found.step == 6  # of the step that was under way
    assert checkpointing.verify(tmp_path / "run" / "checkpoint_6") == []
    count(signals=1, longest_ms=round(1000 * (time.monotonic() - begin)))
