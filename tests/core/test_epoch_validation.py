"""`eval_frequency="epoch"`: a validation at the end of each epoch, wherever a run is resumed."""

from __future__ import annotations

import itertools

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError
from modelzoo_trainer.callbacks import StepBasedEvaluation
from modelzoo_trainer.errors import RollBack
from tests.doubles import Interrupted, Scale, constant_batches, differing, tiny_batches, weights_of


class Diary(Callback):
    """Notes the epoch and step of each validation; raises in the n-th hook call that may.

    Args:
        crash: Number of the call, from 1; 0 = none.
    """

    def __init__(self, crash: int = 0) -> None:
        self.lines: list[tuple[int, int, bool]] = []
        self.finals: list[int] = []
        self._left = crash

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise Interrupted

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.is_final_iteration:
            self.finals.append(trainer.global_step)

    def on_step_committed(self, trainer):
        self._count()

    def on_train_epoch_end(self, trainer, epoch):
        self._count()

    def on_train_end(self, trainer, model, loop, loop_idx):
        self._count()

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self._count()

    def run_validation(self, trainer, loop_idx, is_last):
        self.lines.append((trainer.data.epoch, trainer.global_step, is_last))
        self._count()


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"num_epochs": 2}, [(1, 5, False), (2, 10, True)]),
        ({"num_epochs": 2, "grad_accum_steps": 2}, [(1, 3, False), (2, 6, True)]),
        ({"num_epochs": 3, "steps_per_epoch": 2}, [(1, 2, False), (2, 4, False), (3, 6, True)]),
        ({"max_steps": 7}, [(1, 5, False), (1, 7, True)]),
        ({"max_steps": 5}, [(1, 5, True)]),
        ({"max_steps": 3}, [(0, 3, True)]),
    ],
)
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.slow_cases(every=4)
def test_it_is_at_the_end_of_each_epoch_and_of_the_run(
    trainer_of, settings, lines, has_length
) -> None:
    diary = Diary()
    trainer = trainer_of(diary, eval_frequency="epoch", **settings)
    batches = tiny_batches(5)
    trainer.fit(batches if has_length else lambda: iter(batches), tiny_batches(1))
    assert diary.lines == lines


def test_the_last_batch_of_each_epoch_is_a_final_one(trainer_of) -> None:
    diary = Diary()
    trainer_of(diary, eval_frequency="epoch", num_epochs=2).fit(tiny_batches(5))
    assert diary.finals == [4, 9]


@pytest.mark.slow_cases("1-steps", "?-seldom", "2-epochs", "2-steps", "1-epochs")
@pytest.mark.parametrize(
    "checkpoint", [{"steps": 1}, {"epochs": 1}, {"steps": 2}], ids=["steps", "epochs", "seldom"]
)
@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_a_run_that_is_resumed_anywhere_validates_where_the_whole_one_does(
    trainer_of, tmp_path, checkpoint, grad_accum_steps
) -> None:
    settings = {
        "num_epochs": 3,
        "eval_frequency": "epoch",
        "grad_accum_steps": grad_accum_steps,
        "checkpoint": Checkpoint(**checkpoint),
    }
    data = tiny_batches(3), tiny_batches(1)
    whole = Diary()
    reference = trainer_of(whole, model_dir=tmp_path / "whole", **settings)
    reference.fit(*data)
    for crash in itertools.count(1):
        broken, resumed = Diary(crash), Diary()
        folder = tmp_path / str(crash)
        try:
            trainer_of(broken, model_dir=folder, **settings).fit(*data)
        except Interrupted:
            pass
        else:
            break
        trainer = trainer_of(resumed, model_dir=folder, **settings)
        trainer.fit(*data)
        assert sorted({*broken.lines, *resumed.lines}) == whole.lines, crash
        assert resumed.lines == whole.lines[len(whole.lines) - len(resumed.lines) :], crash
        assert differing(weights_of(reference), weights_of(trainer)) == []
    assert crash > 15


def test_a_validation_is_not_repeated_after_a_checkpoint_of_each_step(trainer_of, tmp_path) -> None:
    settings = {"eval_frequency": "epoch", "checkpoint": Checkpoint(steps=1)}
    first, second = Diary(), Diary()
    trainer_of(first, num_epochs=2, **settings).fit(tiny_batches(3), tiny_batches(1))
    trainer_of(second, num_epochs=4, **settings).fit(tiny_batches(3), tiny_batches(1))
    assert [step for _, step, _ in first.lines] == [3, 6]
    assert [step for _, step, _ in second.lines][-2:] == [9, 12]
    assert 3 not in [step for _, step, _ in second.lines]


@pytest.mark.parametrize("has_length", [True, False])
def test_an_epoch_that_is_skipped_as_a_whole_has_no_validation(trainer_of, has_length) -> None:
    class Skip(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            trainer.data.skip_batches([(1, 0), (1, 1)])

    diary = Diary()
    batches = tiny_batches(2)
    trainer_of(Skip(), diary, num_epochs=3, eval_frequency="epoch").fit(
        batches if has_length else lambda: iter(batches), tiny_batches(1)
    )
    assert [step for _, step, _ in diary.lines] == [2, 4]


def test_a_rollback_over_the_end_of_an_epoch_validates_it_again(trainer_of) -> None:
    class GoBack(Callback):
        left = 1

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 4 and self.left:
                self.left = 0
                raise RollBack("bad", step=2, batches=[(0, 1)], cause=RuntimeError("no checkpoint"))

    diary = Diary()
    trainer_of(
        GoBack(), diary, num_epochs=3, eval_frequency="epoch", checkpoint=Checkpoint(steps=1)
    ).fit(tiny_batches(3), tiny_batches(1))
    assert [step for _, step, _ in diary.lines] == [3, 2, 5, 8]


def test_a_second_fit_begins_with_a_whole_epoch(trainer_of) -> None:
    diary = Diary()
    trainer = trainer_of(diary, num_epochs=1, eval_frequency="epoch")
    for _ in range(2):
        trainer.fit(tiny_batches(3), tiny_batches(1))
    assert [step for _, step, _ in diary.lines] == [3, 6]


def test_several_dataloaders_are_validated_on_each_time(trainer_of) -> None:
    diary = Diary()
    trainer = trainer_of(diary, num_epochs=2, eval_frequency="epoch", model=Scale)
    losses = []

    class Listen(Callback):
        def on_metrics(self, trainer, metrics, step):
            losses.extend((name, step) for name in metrics if name.startswith("validate"))

    trainer.add_callback(Listen())
    trainer.fit(constant_batches(1), [lambda: constant_batches(1), lambda: constant_batches(2)])
    assert losses == [
        ("validate_0/loss", 1),
        ("validate_1/loss", 1),
        ("validate_0/loss", 2),
        ("validate_1/loss", 2),
    ]


def test_how_many_stages_are_left_follows_from_the_length_of_an_epoch(trainer_of) -> None:
    seen = []

    class Look(Callback):
        def on_step_committed(self, trainer):
            schedule = trainer.schedule
            left = schedule.num_stages_left(trainer.global_step)
            seen.append((trainer.global_step, left, schedule.likely_stage_end))

    trainer_of(Look(), num_epochs=2, eval_frequency="epoch").fit(tiny_batches(2))
    assert seen == [(1, 2, 2), (2, 2, 2), (3, 1, 4), (4, 1, 4)]


@pytest.mark.parametrize("given", ["epochs", "Epoch", "1"])
def test_another_word_is_refused(trainer_of, given) -> None:
    with pytest.raises(ConfigError, match=rf"loop\.eval_frequency.*'epoch'.*{given}"):
        trainer_of(eval_frequency=given)


def test_it_cannot_be_divided_by_steps(trainer_of) -> None:
    trainer = trainer_of(StepBasedEvaluation(2), eval_frequency="epoch")
    with pytest.raises(ConfigError, match=r"every_n_steps is 2.*'epoch'"):
        trainer.fit(tiny_batches(3), tiny_batches(1))
