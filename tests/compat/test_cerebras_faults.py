"""Known faults of the Model Zoo's trainer, and what is so here instead."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref

import pytest
import torch
from torch import nn

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    HookError,
    Logging,
    MixedPrecision,
    TrainingLoop,
    callbacks,
)
from modelzoo_trainer.callbacks import CheckLoss, ComputeNorm
from tests.doubles import History, Interrupted, run_trainer, tiny_batches


def test_a_callback_entered_twice_stays_until_the_outer_block_ends(trainer_of):
    trainer, check = trainer_of(check_loss=False), CheckLoss()
    with check:
        with check:
            pass
        assert trainer.get_callbacks(CheckLoss) == [check]
    assert trainer.get_callbacks(CheckLoss) == []


def test_an_exception_of_a_hook_keeps_its_type(trainer_of):
    class Fails(Callback):
        def on_train_end(self, trainer, model, loop, loop_idx):
            raise Interrupted

    with pytest.raises(Interrupted) as caught:
        trainer_of(Fails()).fit(tiny_batches())
    assert caught.value.__notes__ == ["raised in Fails.on_train_end at global_step 3"]


def test_an_unknown_hook_is_told_when_the_class_is_defined():
    with pytest.raises(HookError, match="Did you mean 'on_train_batch_end'"):
        type("Own", (Callback,), {"on_train_batch_edn": lambda self, trainer: None})


def test_a_trainer_is_freed_with_its_last_name(tmp_path):
    ended = []

    class Ends(Callback):
        def finalize(self):
            ended.append("finalized")

    trainer = run_trainer(tmp_path, Ends())
    made = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert ended == ["finalized"]
    assert made() is None


@pytest.mark.parametrize("num", [1, 4])
def test_the_loss_of_validations_does_not_depend_on_accumulation(trainer_of, tmp_path, num):
    history = History()
    trainer = trainer_of(loggers=history, grad_accum_steps=num, num_steps=1)
    batches = tiny_batches(4)
    trainer.fit(batches, batches)
    with torch.no_grad():
        expected = sum(trainer.model(batch)[0].item() for batch in batches) / 4
    assert history.of("validate_0/loss") == [(1, pytest.approx(expected))]


def test_optimizers_and_schedulers_of_torch_are_taken(trainer_of):
    model = nn.Linear(1, 1)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, batch):
            return self.layer(batch).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    trainer = trainer_of(model=Loss(), optimizer=optimizer, schedulers=scheduler, num_steps=2)
    before = model.bias.item()
    trainer.fit([torch.ones(2, 1)] * 2)
    assert model.bias.item() == pytest.approx(before - 0.5 - 0.05)


def test_metrics_of_a_step_have_its_number(trainer_of):
    class Both(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.log_metrics(before=1)

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(after=1)

    history = History()
    trainer = trainer_of(Both(), loggers=history, num_steps=2)
    trainer.fit(tiny_batches())
    assert history.of("before") == history.of("after") == [(1, 1), (2, 1)]


def test_defaults_of_yaml_are_the_cheap_ones():
    names = [type(one).__name__ for one in callbacks.default_callbacks()]
    assert names == [
        "CheckLoss",
        "LogOptimizerParamGroup",
        "ComputeNorm",
        "ModelEvalMetrics",
        "RateProfiler",
        "DurationProfiler",
        "SavePerformanceData",
        "ModelZooParamsMetadata",
    ]


def test_norms_are_computed_on_log_steps_alone(trainer_of, monkeypatch):
    computed = []
    real = ComputeNorm.on_before_optimizer_step

    def counted(self, trainer, model, optimizer):
        computed.append(trainer.global_step + 1)
        real(self, trainer, model, optimizer)

    monkeypatch.setattr(ComputeNorm, "on_before_optimizer_step", counted)
    trainer_of(ComputeNorm(), logging=Logging(log_steps=2), max_steps=5).fit(tiny_batches())
    assert computed == [2, 4, 5]


def test_what_a_callback_keeps_is_in_every_checkpoint(trainer_of, tmp_path):
    class Counts(Callback):
        num = 0

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.num += 1

        def state_dict(self):
            return {"num": self.num}

        def load_state_dict(self, state_dict):
            self.num = state_dict["num"]

    trainer_of(Counts(), checkpoint=Checkpoint(steps=1), max_steps=2).fit(tiny_batches())
    resumed = Counts()
    trainer_of(resumed, checkpoint=Checkpoint(steps=1), max_steps=5).fit(tiny_batches())
    assert resumed.num == 5


def test_a_checkpoint_that_was_copied_into_the_folder_is_found(trainer_of, tmp_path):
    first = trainer_of(checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(tiny_batches())
    copied = tmp_path / "copied"
    shutil.copytree(first.model_dir / "checkpoint_2", copied / "checkpoint_2")
    second = trainer_of(checkpoint=Checkpoint(), max_steps=3, model_dir=copied)
    steps = []
    second.add_callback(("post-optimizer-step", lambda self: steps.append(self.global_step)))
    second.fit(tiny_batches())
    assert len(steps) == 1
    assert second.global_step == 3


def test_functions_of_early_exit_stay_for_the_next_fit(trainer_of):
    trainer = trainer_of(num_steps=5)
    handle = trainer.early_exit.register(lambda: trainer.global_step % 2 == 0)
    trainer.fit(tiny_batches())
    trainer.fit(tiny_batches())
    assert trainer.global_step == 4
    handle.remove()
    trainer.fit(tiny_batches())
    assert trainer.global_step > 4


def test_the_root_logger_is_left_alone(trainer_of):
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    trainer_of(logging=Logging(log_level="DEBUG"), num_steps=1).fit(tiny_batches())
    assert (list(root.handlers), root.level) == before


def test_unknown_keys_of_the_backend_are_told(trainer_of):
    with pytest.raises((ValueError, TypeError, RuntimeError), match="max_wgt_servrs"):
        trainer_of(device=None, backend={"backend_type": "CPU", "max_wgt_servrs": 1})


@pytest.mark.parametrize(("frequency", "steps"), [(1, [1, 2, 3]), (1.0, [3])])
def test_one_is_after_each_step_and_a_fraction_of_one_at_the_end(trainer_of, frequency, steps):
    history = History()
    trainer = trainer_of(loggers=history, max_steps=3, eval_frequency=frequency)
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert [step for step, _ in history.of("validate_0/loss")] == steps


def test_settings_are_refused_before_a_run():
    with pytest.raises(ConfigError, match=r"loop\.num_steps: expected .*, got 0"):
        TrainingLoop(num_steps=0)
    with pytest.raises(ConfigError, match="max_gradient_norm"):
        MixedPrecision(max_gradient_norm=-1.0)
