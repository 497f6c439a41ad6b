"""What ends a plan before its end: errors of the user's code, and signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from backends.coordination.world import World
from backends.parallel.fake_world import FakeWorld
from modelzoo_trainer.cli.command import main

FILE = """
trainer:
  init:
    device: cpu
    model_dir: run
    model: {tests.tools.planning.test_errors.KIND: {}}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 3}
    checkpoint: {steps: 1}
  fit:
    train_dataloader: {data_processor: SyntheticProcessor, batch_size: 4, num_features: 8}
"""


class Raising(nn.Linear):
    """Fails in the step."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, batch: Any) -> Tensor:
        raise RuntimeError("a mistake of the model")


class Signalled(nn.Linear):
    """Gets a signal in the step."""

    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, batch: Any) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(batch["features"]).square().mean()


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(kind, num):
        Path("params.yaml").write_text(FILE.replace("KIND", kind))
        return main(["plan", "params.yaml", "--world-size", num])

    return start


def test_the_simulated_processes_have_all_that_real_ones_have():
    names = {name for name in dir(World) if not name.startswith("_")}
    assert names - set(dir(FakeWorld)) == set()


@pytest.mark.parametrize("num", ["1", "2"])
def test_an_error_in_the_step_is_not_hidden_by_another(plan, num):
    with pytest.raises(RuntimeError, match="a mistake of the model") as caught:
        plan("Raising", num)
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_signal_ends_a_plan_at_once_and_saves_nothing(plan, capfd, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(SystemExit) as caught:
        plan("Signalled", "1")
    assert caught.value.code == 143
    assert capfd.readouterr() == ("", "")
    assert not any((tmp_path / "tmp").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.yaml", "tmp"]
