"""How many steps, stages and validations a run has."""

from __future__ import annotations

import pytest

from modelzoo_trainer import Callback, ConfigError
from tests.doubles import Recorder, Scale, constant_batches, tiny_batches


class Validations(Callback):
    """Writes down the steps at which validations begin, and at which stages and runs end."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.stages: list[tuple[int, int]] = []

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.steps.append(trainer.global_step)

    def on_train_end(self, trainer, model, loop, loop_idx):
        self.stages.append((loop_idx, trainer.global_step))


@pytest.mark.parametrize(
    ("frequency", "steps"),
    [
        (1.0, [10]),
        (0.5, [5, 10]),
        (0.3, [3, 6, 9, 10]),
        (0.01, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, [4, 8, 10]),
        (1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (10, [10]),
        (100, [10]),
        (None, []),
        (0, []),
        (0.0, []),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_validations_are_where_the_frequency_says(trainer_of, frequency, steps) -> None:
    validations = Validations()
    trainer_of(validations, num_epochs=2, eval_frequency=frequency).fit(
        tiny_batches(5), tiny_batches(1)
    )
    assert validations.steps == steps


def test_stages_are_numbered_from_zero_and_end_where_validations_are(trainer_of) -> None:
    validations = Validations()
    trainer_of(validations, num_epochs=1, eval_frequency=2).fit(tiny_batches(5))
    assert validations.stages == [(0, 2), (1, 4), (2, 5)]


def test_without_validations_there_is_one_stage(trainer_of) -> None:
    validations = Validations()
    trainer_of(validations, num_epochs=3, eval_frequency=None).fit(tiny_batches(2))
    assert validations.stages == [(0, 6)]


def test_a_frequency_counts_steps_and_not_batches(trainer_of) -> None:
    validations = Validations()
    trainer_of(validations, num_epochs=1, eval_frequency=2, grad_accum_steps=2).fit(
        tiny_batches(8), tiny_batches(1)
    )
    assert validations.steps == [2, 4]


def test_a_fraction_of_a_run_of_unknown_length_is_refused(trainer_of) -> None:
    with pytest.raises(
        ConfigError, match=r"^loop\.eval_frequency is 0\.5, a fraction, .*Set loop\.max_steps"
    ):
        trainer_of(model=Scale, eval_frequency=0.5).fit(iter(constant_batches(1, 2)))


def test_the_whole_of_a_run_of_unknown_length_is_validated_at_its_end(trainer_of) -> None:
    validations = Validations()
    trainer_of(validations, model=Scale, eval_frequency=1.0).fit(
        iter(constant_batches(1, 2)), constant_batches(1)
    )
    assert validations.steps == [2]


def test_a_fraction_of_max_steps_needs_no_length(trainer_of) -> None:
    validations = Validations()
    trainer_of(validations, model=Scale, eval_frequency=0.5, max_steps=2).fit(
        iter(constant_batches(1, 2, 3)), constant_batches(1)
    )
    assert validations.steps == [1, 2]


def test_one_epoch_is_the_default(trainer_of) -> None:
    trainer = trainer_of()
    trainer.fit(tiny_batches(3))
    assert (trainer.global_step, trainer.data.epoch) == (3, 1)


def test_num_steps_goes_before_max_steps(trainer_of) -> None:
    trainer = trainer_of(num_steps=5, max_steps=2)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 5


def test_max_steps_ends_before_num_epochs(trainer_of) -> None:
    trainer = trainer_of(num_epochs=4, max_steps=5)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 5


def test_num_epochs_ends_before_max_steps(trainer_of) -> None:
    trainer = trainer_of(num_epochs=1, max_steps=5)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 3


def test_epoch_hooks_surround_each_pass(trainer_of) -> None:
    seen = []

    class Epochs(Callback):
        def on_train_epoch_start(self, trainer, epoch):
            seen.append(("start", epoch, trainer.global_step))

        def on_train_epoch_end(self, trainer, epoch):
            seen.append(("end", epoch, trainer.global_step))

    trainer_of(Epochs(), num_epochs=2).fit(tiny_batches(3))
    assert seen == [("start", 0, 0), ("end", 0, 3), ("start", 1, 3), ("end", 1, 6)]


def test_an_epoch_that_is_cut_off_has_no_end(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder, max_steps=4).fit(tiny_batches(3))
    assert (recorder.count("on_train_epoch_start"), recorder.count("on_train_epoch_end")) == (2, 1)


def test_the_last_batch_of_a_stage_is_known(trainer_of) -> None:
    seen = []

    class Looking(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            seen.append(trainer.is_final_iteration)

        def on_validate_step_end(self, trainer, model, outputs, batch):
            seen.append(f"val {trainer.is_first_iteration} {trainer.is_final_iteration}")

    trainer_of(Looking(), eval_frequency=2).fit(tiny_batches(3), tiny_batches(2))
    assert seen == [
        *(False, True),
        *("val True False", "val False True"),
        True,
        *("val True False", "val False True"),
    ]
