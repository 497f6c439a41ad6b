"""Custom validations: their name scope, and when they run."""

import pytest

from modelzoo_trainer import TrainingLoop, ValidationCallback


class Own(ValidationCallback):
    name_scope = "own"
    every_n_vals = 2
    num_validate_loops = 0

    def run_validation(self, trainer, loop_idx, is_last):
        if self.is_due(loop_idx, is_last):
            trainer.log_metrics(score=trainer.global_step)


class More(Own):
    def run_validation(self, trainer, loop_idx, is_last):
        super().run_validation(trainer, loop_idx, is_last)
        trainer.log_metrics(more=trainer.global_step)


class Nameless(Own):
    name_scope = ""


class Inherits(Own):
    name_scope = "inherited"


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_it_runs_when_due_and_last_under_its_name(make, batches, history, device):
    loop = TrainingLoop(max_steps=5, eval_frequency=1)
    make(Own(), loop=loop, device=device).fit(batches)
    assert history.of("own/score") == [(2, 2), (4, 4), (5, 5)]


def test_outside_a_fit_it_is_always_due(make, history):
    make(Own()).validate_all()
    assert history.of("own/score") == [(0, 0)]


def test_a_subclass_that_calls_super_has_one_scope(make, batches, history):
    make(More()).fit(batches)
    assert history.of("own/score") == [(4, 4)]
    assert history.of("own/more") == [(4, 4)]


def test_a_subclass_that_inherits_it_has_its_own_scope(make, batches, history):
    make(Inherits()).fit(batches)
    assert history.of("inherited/score") == [(4, 4)]


def test_without_a_name_there_is_no_scope(make, batches, history):
    make(Nameless()).fit(batches)
    assert history.of("score") == [(4, 4)]


def test_the_scope_ends_with_it_whatever_happens(make, batches):
    class Fails(Own):
        def run_validation(self, trainer, loop_idx, is_last):
            raise RuntimeError("stop")

    trainer = make(Fails())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            trainer.validate_all()
        assert trainer.name_scope_path == ""


def test_it_is_still_abstract():
    class Half(ValidationCallback):
        name_scope = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()
