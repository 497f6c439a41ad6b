"""fit called again: an interrupted fit is finished, a finished one is repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop
from modelzoo_trainer.callbacks import EarlyStopping, RunHistory
from tests.doubles import History, TinyModel, differing, tiny_batches, weights_of


class InterruptAt(Callback):
    """Interrupts the fit once, at a step, gracefully or by an error."""

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.step = -1
            if self.error is not None:
                raise self.error("lost")
            trainer.early_exit.interrupt("max_time")


class Grows:
    """A batch sampler of 2, 3, 4, ... batches, which depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + self.epoch

    def __iter__(self) -> Any:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[3 * idx : 3 * idx + 3] for idx in range(len(self))])


class Stream:
    """An iterable that shuffles by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Any:
        batches = tiny_batches(4)
        return (batches[idx] for idx in torch.randperm(4, generator=self.generator).tolist())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


LOADERS = {
    "list": lambda: tiny_batches(4),
    "shuffled": lambda: DataLoader(samples(), batch_size=6, shuffle=True),
    "growing": lambda: DataLoader(samples(), batch_sampler=Grows()),
    "stream": Stream,
}


def make(trainer_of, folder: Any, *callbacks: Any, **settings: Any) -> tuple[Any, History]:
    history = History()
    plan = {"model": lambda: TinyModel(dropout=0.5), "num_epochs": 3, "loggers": history}
    return trainer_of(*callbacks, model_dir=folder, **(plan | settings)), history


def lines_of(*histories: History) -> list[Any]:
    return [line for history in histories for line in history.lines]


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("step", [1, 4, 5])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.slow_cases(every=4)
def test_a_second_fit_finishes_an_interrupted_one(trainer_of, tmp_path, kind, step, is_new):
    settings = {"eval_frequency": "epoch", "grad_accum_steps": 2 if step == 5 else 1}
    whole, expected = make(trainer_of, tmp_path / "whole", **settings)
    loader = LOADERS[kind]()
    whole.fit(loader, tiny_batches(1))
    trainer, history = make(trainer_of, tmp_path / "run", InterruptAt(step), **settings)
    loader = LOADERS[kind]()
    trainer.fit(loader, tiny_batches(1))
    assert (trainer.interrupted, trainer.global_step) == ("max_time", step)
    trainer.fit(LOADERS[kind]() if is_new else loader, tiny_batches(1))
    assert trainer.global_step == whole.global_step
    assert differing(weights_of(trainer), weights_of(whole)) == []
    assert lines_of(history) == lines_of(expected)


@pytest.mark.parametrize("ckpt_path", [..., None])
def test_callbacks_that_start_each_fit_anew_go_on_with_an_interrupted_one(
    trainer_of, tmp_path, ckpt_path
):
    states = []
    for interrupts in ([], [InterruptAt(4)]):
        own = [RunHistory(), EarlyStopping("validate_0/loss", min_delta=100.0, patience=9)]
        trainer, _ = make(trainer_of, tmp_path / "run", *own, *interrupts, eval_frequency=2)
        for _ in range(1 + len(interrupts)):
            trainer.fit(tiny_batches(3), tiny_batches(1), ckpt_path=ckpt_path)
        epochs = own[0].get_metric_values("train_loss_epoch")
        states.append((epochs, own[0].get_metric_values("loss"), own[1].state_dict()))
    assert len(states[0][0]) == 3
    assert (states[0] == states[1]) == (ckpt_path is ...)


@pytest.mark.parametrize("length", [{"num_epochs": 3}, {"num_steps": 9}, {"max_steps": 9}])
def test_a_finished_fit_trains_again_by_its_length(trainer_of, tmp_path, length):
    settings = {"num_epochs": None} | length
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(4), **settings)
    steps = []
    for _ in range(3):
        trainer.fit(tiny_batches(3))
        steps.append(trainer.global_step)
    assert steps == [4, 9, 9 if "max_steps" in length else 18]


def test_a_fit_that_failed_is_finished_by_the_next(trainer_of, tmp_path):
    whole, _ = make(trainer_of, tmp_path / "whole")
    whole.fit(tiny_batches(3))
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(4, LookupError))
    with pytest.raises(LookupError):
        trainer.fit(tiny_batches(3))
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == whole.global_step == 9
    assert differing(weights_of(trainer), weights_of(whole)) == []


def test_without_a_checkpoint_a_second_fit_is_a_new_one(trainer_of, tmp_path):
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(4))
    trainer.fit(tiny_batches(3))
    trainer.fit(tiny_batches(3), ckpt_path=None)
    assert (trainer.global_step, trainer.data.epoch) == (4 + 9, 2 + 3)


def test_a_checkpoint_that_is_loaded_in_between_is_not_continued_as_the_other(trainer_of, tmp_path):
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(4), checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(3))
    trainer.validate(tiny_batches(1), ckpt_path=tmp_path / "run" / "checkpoint_2")
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 2 + 1 + 6  # the rest of its epoch is one of the three


def test_an_iterator_that_was_interrupted_gives_what_is_left(trainer_of, tmp_path):
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(2), num_epochs=None, max_steps=5)
    batches = iter(tiny_batches(8))
    trainer.fit(batches)
    trainer.fit(batches)
    assert (trainer.global_step, trainer.data.epoch, trainer.data.batch_idx) == (5, 1, 3)


def test_a_checkpoint_after_an_interrupted_fit_finishes_it_elsewhere(trainer_of, tmp_path):
    trainer, _ = make(trainer_of, tmp_path / "run", InterruptAt(4))
    trainer.fit(tiny_batches(3))
    path = trainer.save_checkpoint()
    other, _ = make(trainer_of, tmp_path / "other")
    other.fit(tiny_batches(3), ckpt_path=path)
    trainer.fit(tiny_batches(3))
    assert other.global_step == trainer.global_step == 9
    assert differing(weights_of(trainer), weights_of(other)) == []


# ---- epochs of different lengths


@pytest.mark.parametrize("frequency", ["epoch", 0.5])
@pytest.mark.parametrize("step", range(1, 10))
@pytest.mark.slow_cases(every=4)
def test_epochs_that_grow_are_resumed_exactly(trainer_of, tmp_path, step, frequency):
    whole, expected = make(trainer_of, tmp_path / "whole", eval_frequency=frequency)
    whole.fit(LOADERS["growing"](), tiny_batches(1))
    assert (whole.global_step, whole.data.epoch) == (2 + 3 + 4, 3)

    def part(*callbacks):
        saved = Checkpoint(steps=1)
        settings = {"eval_frequency": frequency, "checkpoint": saved}
        trainer, history = make(trainer_of, tmp_path / "run", *callbacks, **settings)
        trainer.fit(LOADERS["growing"](), tiny_batches(1))
        return trainer, history

    _, before = part(InterruptAt(step))
    resumed, after = part()
    assert resumed.global_step == 9
    assert differing(weights_of(resumed), weights_of(whole)) == []
    assert lines_of(before, after) == lines_of(expected)


@pytest.mark.parametrize(
    ("length", "steps"), [({"num_epochs": 3}, 9), ({"num_epochs": 3, "max_steps": 7}, 7)]
)
def test_epochs_decide_the_length_of_a_run_and_steps_limit_it(trainer_of, tmp_path, length, steps):
    trainer, _ = make(trainer_of, tmp_path, loop=TrainingLoop(**length))
    trainer.fit(LOADERS["growing"]())
    assert trainer.global_step == steps


def test_the_likely_end_of_a_run_follows_its_epochs(trainer_of, tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            seen.append(trainer.schedule.total_steps)

    trainer, _ = make(trainer_of, tmp_path, Watch())
    trainer.fit(LOADERS["growing"]())
    assert seen == [6] * 2 + [2 + 3 * 2] * 3 + [9] * 4
