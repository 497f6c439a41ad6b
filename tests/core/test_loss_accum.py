"""The loss that is logged: of cut steps to the last bit, of cut validations not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Logging, checkpointing
from modelzoo_trainer.core.loss_accum import WeightedMean
from tests.doubles import Cut, History, SaveAndCut, TinyModel, make_trainer, tiny_batches


def runs(tmp_path, name: str, *callbacks: Any, **settings: Any) -> tuple[Any, History]:
    history = History()
    plan = {"model": lambda: TinyModel(dropout=0.5), "max_steps": 4, "grad_accum_steps": 3}
    trainer = make_trainer(tmp_path / name, *callbacks, loggers=history, **(plan | settings))
    return trainer, history


@pytest.mark.slow_cases("fake-[245]-*", every=4)
@pytest.mark.parametrize("log_steps", [1, 3])
@pytest.mark.parametrize("num", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_loss_of_a_step_that_was_cut_is_that_of_one_that_was_not(
    tmp_path, num, device, log_steps
) -> None:
    settings = {"device": device, "logging": Logging(log_steps=log_steps)}
    whole, expected = runs(tmp_path, "whole", **settings)
    whole.fit(tiny_batches(4))
    cut, before = runs(tmp_path, "cut", SaveAndCut(num), **settings)
    with pytest.raises(Cut):
        cut.fit(tiny_batches(4))
    resumed, after = runs(tmp_path, "cut", **settings)
    resumed.fit(tiny_batches(4))
    assert before.of("loss") + after.of("loss") == expected.of("loss")


@pytest.mark.parametrize(("num", "is_there"), [(1, True), (2, True), (3, False)])
def test_it_is_in_the_checkpoint_only_in_the_middle_of_a_step(tmp_path, num, is_there) -> None:
    trainer, _ = runs(tmp_path, "cut", SaveAndCut(num))
    with pytest.raises(Cut):
        trainer.fit(tiny_batches(4))
    [info] = checkpointing.list_checkpoints(tmp_path / "cut")
    assert ("loss_accum" in checkpointing.load(info.path)) == is_there


@pytest.mark.parametrize("weight", [3, torch.tensor(3)])
def test_a_mean_goes_on_with_all_its_bits(weight) -> None:
    values = torch.rand(20, generator=torch.Generator().manual_seed(1)) / 3
    whole, first, second = (WeightedMean(double=True) for _ in range(3))
    for value in values:
        whole.add(value, weight)
    for value in values[:11]:
        first.add(value, weight)
    second.add(values[0], 1)
    second.load_state_dict(first.state_dict(), torch.device("cpu"))
    for value in values[11:]:
        second.add(value, weight)
    assert torch.equal(second.take(), whole.take())


def test_a_mean_of_nothing_has_no_state() -> None:
    mean = WeightedMean(double=True)
    assert mean.state_dict() is None
    mean.load_state_dict(None, torch.device("cpu"))
    assert mean.take() is None


def test_what_is_added_after_a_state_was_taken_is_not_in_it() -> None:
    mean = WeightedMean(double=True)
    mean.add(torch.tensor(1.0), 1)
    state = mean.state_dict()
    mean.add(torch.tensor(5.0), 1)
    assert state == {"sum": torch.tensor(1.0, dtype=torch.float64), "weight": 1}


class StopIn(Callback):
    """Asks for the end of the run after so many batches of a validation."""

    def __init__(self, num: int) -> None:
        self.num = num

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx + 1 == self.num:
            trainer.early_exit.stop("enough")


@pytest.mark.parametrize(("num", "logged"), [(1, []), (2, []), (3, [2])])
def test_a_validation_that_was_cut_short_logs_no_loss(tmp_path, num, logged) -> None:
    trainer, history = runs(tmp_path, "run", StopIn(num), max_steps=2)
    trainer.fit(tiny_batches(4), tiny_batches(3))
    assert [step for step, _ in history.of("validate_0/loss")] == logged


def test_the_next_validation_has_nothing_of_the_one_that_was_cut_short(tmp_path) -> None:
    stopping = StopIn(1)
    trainer, history = runs(tmp_path, "run", stopping)
    trainer.validate(tiny_batches(3))
    stopping.num = 0
    val = tiny_batches(3, seed=5)
    trainer.validate(val)
    whole, expected = runs(tmp_path, "other")
    whole.validate(val)
    [(_, loss)] = history.of("validate_1/loss")
    assert loss == expected.of("validate_0/loss")[0][1]
