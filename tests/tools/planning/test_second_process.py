"""A second process measures half of each comparison of a search."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.base.devices import fake_world
from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.tools.planning import search as searching
from modelzoo_trainer.tools.planning import second_process as processes
from modelzoo_trainer.tools.planning.measure import Built, measure, measure_longer
from modelzoo_trainer.tools.planning.meshes import Choice, Mesh
from modelzoo_trainer.tools.planning.second_process import SecondProcess, second_process

FILE = """
trainer:
  init:
    device: CPU
    model: {name: gpt2, vocab_size: 320, hidden_size: 16, num_hidden_layers: 8, num_heads: 2,
            filter_size: 32, max_position_embeddings: 24, dropout_rate: 0.0}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 3}
  fit:
    train_dataloader: {data_processor: SyntheticProcessor, kind: tokens, batch_size: 4,
                       num_samples: 64, max_sequence_length: 16, vocab_size: 320}
"""
CHOICE = Choice(Mesh(2), None, 2, 2)
REFUSED = Choice(Mesh(tensor=4), None, 2, 2)  # of two heads


def load(file: Path, changes: list[str]) -> Sequence[Any]:
    return load_plans(file, shipped_names, mode=None, changes=changes, for_a_run=False)


@pytest.fixture
def given(tmp_path: Path) -> Callable[[list[str]], Any]:
    (tmp_path / "params.yaml").write_text(FILE)
    return partial(load, tmp_path / "params.yaml")


def test_what_cannot_be_sent_is_measured_in_one_process() -> None:
    with second_process(lambda _: [], 0, use_data=False) as second:
        assert second is None


def test_one_core_measures_in_one_process(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "num_cores", lambda: 1)
    with second_process(given, 0, use_data=False) as second:
        assert second is None


@pytest.mark.slow
def test_a_second_process_measures_the_same_until_it_ends(given: Any) -> None:
    with fake_world(2):
        plan = given(CHOICE.changes())[0]
        expected = measure_longer(plan, Built(), one_step=True)
    with second_process(given, 0, use_data=False) as second:
        assert second is not None
        assert second.ask(REFUSED)() is None
        assert second.ask(CHOICE)() == expected
        second.ask(REFUSED)  # its answer is not read
        assert second.ask(CHOICE)() == expected
        _end(second)
        assert second.ask(CHOICE)() is None
        assert second.ask(CHOICE)() is None
    with fake_world(2):
        longer = second.ask(CHOICE)  # closed
        assert measure(plan, one_step=True, longer=longer) == measure(plan, one_step=True)


@pytest.mark.slow
def test_a_search_finds_the_same_in_two_processes(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> Any:
        one = searching.search(given, 0, 2, 1 << 30)
        return one.choice, one.figures, one.num_measured, one.refused

    asked: list[Choice] = []
    ask = SecondProcess.ask
    monkeypatch.setattr(SecondProcess, "ask", lambda self, one: asked.append(one) or ask(self, one))
    together = found()
    assert len(asked) == together[2]
    monkeypatch.setattr(processes, "num_cores", lambda: 1)
    assert found() == together


def _end(second: Any) -> None:
    os.kill(second._process.pid, signal.SIGKILL)
    second._process.join()
