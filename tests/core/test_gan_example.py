"""The GAN of docs/examples: it learns, and a run that was killed ends with the same weights."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import Checkpoint, checkpointing
from modelzoo_trainer.tools.checkpoints.compare import compare

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gan.py"
STEPS, SAVED_EVERY, KILLED_AT = 44, 5, 38  # an epoch has 32

CHILD = """
import os, runpy, signal, sys
from modelzoo_trainer import Callback, Checkpoint

class Kill(Callback):
    def on_before_optimizer_step(self, trainer, model, optimizer):
        if trainer.global_step == {killed_at} and optimizer is trainer.optimizers["generator"]:
            os.kill(os.getpid(), signal.SIGKILL)

gan = runpy.run_path({example!r})
gan["fit"](gan["make_trainer"]({folder!r}, {steps}, Checkpoint(steps={every}), [Kill()]))
"""


@pytest.fixture(scope="module")
def gan() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def train(gan: dict[str, Any], folder: Path, steps: int = STEPS) -> None:
    with gan["make_trainer"](folder, steps, Checkpoint(steps=SAVED_EVERY)) as trainer:
        gan["fit"](trainer)


@pytest.mark.slow
def test_a_run_that_was_killed_within_a_step_resumes_bit_for_bit(tmp_path, gan) -> None:
    script = CHILD.format(
        example=str(EXAMPLE),
        folder=str(tmp_path / "run"),
        steps=STEPS,
        every=SAVED_EVERY,
        killed_at=KILLED_AT,
    )
    child = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert child.returncode == -signal.SIGKILL
    assert checkpointing.list_checkpoints(tmp_path / "run")[-1].path.name == "checkpoint_35"
    train(gan, tmp_path / "run")
    train(gan, tmp_path / "whole")
    first, second = (
        checkpointing.load(tmp_path / name / "checkpoint_40") for name in ("run", "whole")
    )
    assert compare(first, second) == []
    assert first["optimizers"]["generator"]["state"][0]["step"] == 40


@pytest.mark.slow
def test_what_it_draws_comes_closer(tmp_path, gan, capsys) -> None:
    gan["main"]([str(tmp_path), "--steps", "600"])
    before, after = capsys.readouterr().out.split(":")[1].split("->")
    assert float(after) < 0.6 * float(before)
