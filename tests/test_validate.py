"""Validation: alone, inside fit, over several dataloaders, with hooks of one's own."""

from __future__ import annotations

import pytest
import torch

from modelzoo_trainer import (
    Callback,
    ConfigError,
    HookError,
    TrainingLoop,
    ValidationCallback,
    ValidationLoop,
)
from tests.doubles import (
    History,
    Recorder,
    Scale,
    constant_batches,
    differing,
    tiny_batches,
    weights_of,
)


def test_validate_alone_logs_the_loss(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history, model=Scale, optimizer=None)
    trainer.validate(constant_batches(1, 2, 3))
    assert history.lines == [(0, {"validate_0/loss": 2.0})]


def test_validate_alone_changes_nothing(trainer_of) -> None:
    trainer = trainer_of()
    before = weights_of(trainer)
    trainer.validate(tiny_batches(3))
    assert differing(weights_of(trainer), before) == []
    assert [param.grad for param in trainer.model.parameters()] == [None] * 4


def test_validate_with_a_validation_loop_as_the_trainers_own(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history, model=Scale, loop=ValidationLoop(eval_steps=2))
    trainer.validate(constant_batches(1, 2, 300))
    assert history.of("validate_0/loss") == [(0, 1.5)]


def test_a_training_loop_cannot_be_passed_to_validate(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^validate requires a ValidationLoop, got a TrainingLo"):
        trainer_of().validate(tiny_batches(1), loop=TrainingLoop())


def test_validate_without_a_dataloader_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^val_dataloader got None, which is not iterable"):
        trainer_of().validate()


class DataModule:
    """What a LightningDataModule looks like."""

    def train_dataloader(self):
        return tiny_batches(1)


def test_a_data_module_is_refused_with_what_to_pass(trainer_of) -> None:
    data = DataModule()
    advice = r"DataModule.*setup.*data\.train_dataloader\(\) and data\.val_dataloader\(\)"
    with pytest.raises(ConfigError, match=rf"^train_dataloader got {advice}"):
        trainer_of().fit(data)
    with pytest.raises(ConfigError, match=rf"^val_dataloader got {advice}"):
        trainer_of().validate(data)
    trainer_of().fit(data.train_dataloader)  # a callable


def test_validate_over_an_empty_dataloader_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^val_dataloader yields no batch\."):
        trainer_of().validate([])


def test_fit_with_an_empty_val_dataloader_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^val_dataloader yields no batch\."):
        trainer_of().fit(tiny_batches(1), iter(()))


def test_the_mode_of_each_module_is_restored(trainer_of) -> None:
    seen = []

    class Looking(Callback):
        def on_validate_step_start(self, trainer, model, batch):
            seen.append([part.training for part in model.modules()])

    trainer = trainer_of(Looking())
    trainer.model.train()
    trainer.model.dropout.eval()
    trainer.validate(tiny_batches(1))
    assert seen == [[False] * 4]
    assert [part.training for part in trainer.model.modules()] == [True, True, False, True]


def test_the_mode_of_each_module_is_restored_after_an_exception(trainer_of) -> None:
    class Failing(Callback):
        def on_validate_step_start(self, trainer, model, batch):
            raise LookupError("lost")

    trainer = trainer_of(Failing())
    trainer.model.train()
    with pytest.raises(LookupError):
        trainer.validate(tiny_batches(1))
    assert trainer.model.training
    assert trainer.val_iterator is None


def test_there_are_no_gradients_in_a_validation(trainer_of) -> None:
    seen = []

    class Looking(Callback):
        def on_validate_step_end(self, trainer, model, outputs, batch):
            seen.append((torch.is_grad_enabled(), outputs["loss"].requires_grad))

    trainer_of(Looking()).validate(tiny_batches(1))
    assert seen == [(False, False)]
    assert torch.is_grad_enabled()


# ---- several dataloaders


def test_several_dataloaders_have_a_scope_each(trainer_of) -> None:
    history = History()
    trainer = trainer_of(
        loggers=history, model=Scale, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0)
    )
    ones, twos = DataLoaderOf(1), DataLoaderOf(2)
    trainer.fit(constant_batches(5), [ones, twos])
    assert history.lines == [
        (1, {"loss": 5.0}),
        (1, {"validate_0/loss": 1.0}),
        (1, {"validate_1/loss": 2.0}),
    ]


class DataLoaderOf:
    """A dataloader that is no list."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __iter__(self):
        return iter(constant_batches(self.value))


def test_a_dataloader_keeps_its_scope(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history, model=Scale)
    ones, twos = constant_batches(1), constant_batches(2)
    trainer.validate(ones)
    trainer.validate(twos)
    trainer.validate(ones)
    assert [list(metrics) for _, metrics in history.lines] == [
        ["validate_0/loss"],
        ["validate_1/loss"],
        ["validate_0/loss"],
    ]


def test_the_scope_of_a_dataloader_that_is_gone_is_free_again(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history, model=Scale)
    for _ in range(3):
        trainer.validate(DataLoaderOf(1))
    trainer.validate(constant_batches(1))
    assert [list(metrics) for _, metrics in history.lines] == [["validate_0/loss"]] * 4
    assert len(trainer._val_scopes._loaders) == 1


def test_a_list_of_batches_is_one_dataloader(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).fit(tiny_batches(1), tiny_batches(3))
    assert recorder.count("on_validate_start") == 1
    assert recorder.count("on_validate_batch_end") == 3


PAIR = (torch.zeros(4, 3), torch.zeros(4, 1))


def num_validations(trainer_of, val_dataloader) -> int:
    recorder = Recorder()
    trainer_of(recorder).fit(tiny_batches(1), val_dataloader)
    return recorder.count("on_validate_start")


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("batch", [PAIR, list(PAIR)])
def test_a_list_of_pairs_of_tensors_is_one_dataloader(trainer_of, kind, batch) -> None:
    assert num_validations(trainer_of, kind([batch, batch])) == 1


@pytest.mark.parametrize("outer", [list, tuple])
@pytest.mark.parametrize(
    "inner", [[PAIR, PAIR], [list(PAIR)], [{"x": PAIR[0]}], []], ids=["tuple", "list", "dict", "0"]
)
def test_a_list_of_lists_of_batches_is_refused_as_it_may_be_one_dataloader(
    trainer_of, outer, inner
) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder)
    both = r"lambda: batches; .* \[lambda: first, lambda: second\]"
    with pytest.raises(ConfigError, match=rf"^val_dataloader .* this (list|tuple) .*{both}"):
        trainer.fit(tiny_batches(1), outer([inner, inner]))
    assert recorder.count("on_train_start") == 0
    with pytest.raises(ConfigError, match=r"^val_dataloaders .* this (list|tuple) "):
        trainer.validate_all(outer([inner, inner]))


def test_both_meanings_of_a_list_of_lists_can_be_written(trainer_of) -> None:
    assert num_validations(trainer_of, [lambda: [PAIR], lambda: [PAIR, PAIR]]) == 2
    assert num_validations(trainer_of, lambda: [list(PAIR), list(PAIR)]) == 1


def test_a_list_of_batches_beside_another_dataloader_is_a_dataloader(trainer_of) -> None:
    assert num_validations(trainer_of, [lambda: [PAIR], [PAIR, PAIR]]) == 2


def test_validate_all_goes_through_every_dataloader_and_then_through_ones_own(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).validate_all(tiny_batches(1))
    assert recorder.names[-1] == "run_validation"


def test_validate_all_over_two_dataloaders(trainer_of) -> None:
    history = History()
    trainer_of(loggers=history, model=Scale).validate_all([DataLoaderOf(1), DataLoaderOf(2)])
    assert [metrics for _, metrics in history.lines] == [
        {"validate_0/loss": 1.0},
        {"validate_1/loss": 2.0},
    ]


def test_a_glob_that_matches_nothing_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"^ckpt_paths: 'none_.*' matches no checkpoint"):
        trainer_of().validate_all(tiny_batches(1), ckpt_paths="none_*")


class Own(ValidationCallback):
    """A validation that is more than a pass over a dataloader."""

    name_scope = "own"
    every_n_vals = 1
    num_validate_loops = 1

    def __init__(self) -> None:
        self.calls = []

    def run_validation(self, trainer, loop_idx, is_last):
        self.calls.append((trainer.global_step, loop_idx, is_last))


def test_a_validation_of_ones_own_runs_after_the_dataloaders_of_each_stage(trainer_of) -> None:
    own = Own()
    trainer_of(own, eval_frequency=2).fit(tiny_batches(5), tiny_batches(1))
    assert own.calls == [(2, 0, False), (4, 1, False), (5, 2, True)]


def test_a_validation_of_ones_own_needs_no_dataloader(trainer_of) -> None:
    own = Own()
    trainer_of(own).fit(tiny_batches(3))
    assert own.calls == [(3, 0, True)]


def test_a_validation_of_ones_own_outside_fit_has_no_stage(trainer_of) -> None:
    own = Own()
    trainer_of(own).validate_all()
    assert own.calls == [(0, None, True)]


# ---- hooks of one's own


class MyEval(Callback):
    def __init__(self) -> None:
        self.calls = []

    def on_my_eval_start(self, trainer, model, val_dataloader, loop):
        self.calls.append("start")

    def on_my_eval_batch_start(self, trainer, model, batch, batch_idx):
        self.calls.append(f"batch start {batch_idx}")

    def on_my_eval_step_start(self, trainer, model, batch):
        self.calls.append("step start")

    def on_my_eval_step_end(self, trainer, model, outputs, batch):
        self.calls.append("step end")

    def on_my_eval_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.calls.append(f"batch end {batch_idx}")

    def on_my_eval_end(self, trainer, model, loop):
        self.calls.append("end")


def test_a_validation_loop_may_name_its_own_hooks(trainer_of) -> None:
    mine, recorder = MyEval(), Recorder()
    trainer_of(mine, recorder).validate(tiny_batches(1), loop=ValidationLoop(hook="my_eval"))
    assert mine.calls == [
        "start",
        "batch start 0",
        "step start",
        "step end",
        "batch end 0",
        "end",
    ]
    assert recorder.count("on_validate_start") == 0


def test_a_validation_loop_whose_hooks_nobody_has_runs(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).validate(tiny_batches(1), loop=ValidationLoop(hook="my_eval"))
    assert recorder.count("on_after_forward") == 1


def test_a_validation_loop_whose_hook_is_misspelt_is_refused(trainer_of) -> None:
    with pytest.raises(
        HookError, match=r"'on_validat_start' is not a hook\. Did you mean 'on_valid"
    ):
        trainer_of().validate(tiny_batches(1), loop=ValidationLoop(hook="validat"))


def test_eval_steps_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^ValidationLoop\.eval_steps: expected .*> 0.*, got 0"):
        ValidationLoop(eval_steps=0)


@pytest.mark.parametrize("method", ["validate", "test", "predict", "validate_all"])
def test_another_checkpoint_is_not_validated_while_a_fit_is_running(trainer_of, tmp_path, method):
    class Other(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 2:
                getattr(trainer, method)(tiny_batches(1), path)

    first = trainer_of(model_dir=tmp_path / "first")
    first.fit(tiny_batches(2))
    path = first.save_checkpoint()
    with pytest.raises(ConfigError, match=r"cannot be validated while fit is running"):
        trainer_of(Other()).fit(tiny_batches(4))


def test_current_weights_may_be_validated_while_a_fit_is_running(trainer_of):
    class Own(Callback):
        def on_step_boundary(self, trainer):
            trainer.validate(tiny_batches(1))
            trainer.validate_all(tiny_batches(1), None)

    trainer = trainer_of(Own())
    trainer.fit(tiny_batches(4))
    assert trainer.global_step == 4
