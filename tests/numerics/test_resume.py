"""A run that was stopped and resumed ends, bit by bit, where the unbroken one ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.optim.decay import LinearLR
from tests.doubles import (
    Crash,
    Interrupted,
    Recorder,
    TinyModel,
    differing,
    tiny_batches,
    weights_of,
)


def shuffled() -> DataLoader[Any]:
    inputs, targets = (torch.cat(parts) for parts in zip(*tiny_batches(7, size=4), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


SCHEDULERS = {
    "none": None,
    "torch": lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
    "ours": lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 21),
}


class Runs:
    """Runs of three epochs of seven batches, with dropout, validations and a schedule."""

    def __init__(self, trainer_of, tmp_path, **settings: Any) -> None:
        self.trainer_of = trainer_of
        self.folder = tmp_path
        self.settings = {"num_epochs": 3, "eval_frequency": 5} | settings

    def trainer(self, name: str, *callbacks: Any) -> Any:
        return self.trainer_of(
            *callbacks,
            model=lambda: TinyModel(dropout=0.5),
            optimizer=adamw,
            checkpoint=Checkpoint(steps=1),
            model_dir=self.folder / name,
            **self.settings,
        )

    def unbroken(self) -> dict[str, Tensor]:
        trainer = self.trainer("unbroken")
        trainer.fit(shuffled(), tiny_batches(2))
        self.num_steps = trainer.global_step
        return weights_of(trainer)

    def crashed(self, step: int) -> None:
        with pytest.raises(Interrupted):
            self.trainer("broken", Crash(step)).fit(shuffled(), tiny_batches(2))

    def resumed(self, *callbacks: Any) -> Any:
        torch.rand(17)  # whatever happened in between
        trainer = self.trainer("broken", *callbacks)
        trainer.fit(shuffled(), tiny_batches(2))
        return trainer


@pytest.mark.slow_cases("*-torch", "14-*", "20-*", "5-*", "10-*", every=4)
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("step", [3, 5, 7, 10, 14, 20])
def test_a_resumed_run_ends_at_the_same_weights(trainer_of, tmp_path, scheduler, step) -> None:
    runs = Runs(trainer_of, tmp_path, schedulers=scheduler)
    expected = runs.unbroken()
    runs.crashed(step)
    trainer = runs.resumed()
    assert trainer.global_step == runs.num_steps == 21
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.slow_cases("5", "8")
@pytest.mark.parametrize("step", [2, 4, 5, 8])
def test_a_resumed_run_with_accumulation_ends_at_the_same_weights(
    trainer_of, tmp_path, step
) -> None:
    runs = Runs(trainer_of, tmp_path, grad_accum_steps=2)
    expected = runs.unbroken()
    runs.crashed(step)
    trainer = runs.resumed()
    assert trainer.global_step == runs.num_steps == 12
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.slow_cases("4", "8")
@pytest.mark.parametrize("step", [3, 4, 5, 8])
def test_a_resumed_run_with_steps_per_epoch_ends_at_the_same_weights(
    trainer_of, tmp_path, step
) -> None:
    runs = Runs(trainer_of, tmp_path, steps_per_epoch=4)
    expected = runs.unbroken()
    runs.crashed(step)
    trainer = runs.resumed()
    assert trainer.global_step == runs.num_steps == 12
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.slow_cases("6", "9")
@pytest.mark.parametrize("step", [6, 7, 9])
def test_a_resumed_run_with_max_steps_ends_at_the_same_weights(trainer_of, tmp_path, step) -> None:
    runs = Runs(trainer_of, tmp_path, num_epochs=None, max_steps=16)
    expected = runs.unbroken()
    runs.crashed(step)
    trainer = runs.resumed()
    assert trainer.global_step == runs.num_steps == 16
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.slow
def test_a_run_that_is_broken_twice_ends_at_the_same_weights(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    expected = runs.unbroken()
    runs.crashed(3)
    with pytest.raises(Interrupted):
        runs.resumed(Crash(12))
    assert differing(weights_of(runs.resumed()), expected) == []


def validations_of(recorder: Any) -> int:
    return int(recorder.count("on_validate_start"))


@pytest.mark.parametrize(("step", "left"), [(3, 5), (5, 5), (7, 4), (10, 4), (20, 2)])
@pytest.mark.slow_cases(every=4)
def test_a_resumed_run_validates_where_the_unbroken_one_does(
    trainer_of, tmp_path, step, left
) -> None:
    runs = Runs(trainer_of, tmp_path)
    runs.crashed(step)
    recorder = Recorder()
    runs.resumed(recorder)
    assert validations_of(recorder) == left


def test_a_run_that_is_complete_has_nothing_left_to_do(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    expected = runs.unbroken()
    recorder = Recorder()
    trainer = runs.trainer("unbroken", recorder)
    trainer.fit(shuffled(), tiny_batches(2))
    assert recorder.count("on_train_step_end") == 0
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.parametrize("step", [3, 7])
def test_a_pass_that_is_resumed_begins_once(trainer_of, tmp_path, step) -> None:
    runs = Runs(trainer_of, tmp_path)
    runs.crashed(step)
    epochs = []

    class Epochs(Callback):
        def on_train_epoch_start(self, trainer, epoch):
            epochs.append(epoch)

    runs.resumed(Epochs())
    assert epochs == {3: [0, 1, 2], 7: [1, 2]}[step]


@pytest.mark.slow
def test_a_checkpoint_that_is_named_is_loaded(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    expected = runs.unbroken()
    trainer = runs.trainer("other")
    trainer.fit(shuffled(), tiny_batches(2), ckpt_path=tmp_path / "unbroken" / "checkpoint_9")
    assert differing(weights_of(trainer), expected) == []


def test_no_checkpoint_is_loaded_if_none_is_wanted(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    runs.crashed(3)
    trainer = runs.trainer("broken")
    trainer.fit(shuffled(), tiny_batches(2), ckpt_path=None)
    assert trainer.data.num_batches == 21


@pytest.mark.slow
def test_a_validation_before_a_resumed_fit_changes_nothing(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    expected = runs.unbroken()
    runs.crashed(10)
    trainer = runs.trainer("broken")
    trainer.validate(tiny_batches(2))
    trainer.fit(shuffled(), tiny_batches(2))
    assert trainer.global_step == 21
    assert differing(weights_of(trainer), expected) == []


@pytest.mark.slow
def test_a_checkpoint_loaded_by_hand_is_resumed_from(trainer_of, tmp_path) -> None:
    runs = Runs(trainer_of, tmp_path)
    expected = runs.unbroken()
    trainer = runs.trainer("other")
    trainer.load_checkpoint(tmp_path / "unbroken" / "checkpoint_9")
    trainer.fit(shuffled(), tiny_batches(2))
    assert trainer.global_step == 21
    assert differing(weights_of(trainer), expected) == []
