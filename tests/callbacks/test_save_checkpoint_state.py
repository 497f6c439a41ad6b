"""Copies of parts of checkpoints: when, what is in them, and that they are kept."""

import pytest
import torch

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CheckpointError,
    ConfigError,
    checkpointing,
)
from modelzoo_trainer.callbacks import KeepNCheckpoints, SaveCheckpointState


def names(folder):
    """The names of the checkpoints that are not the run's own."""
    found = [info.path.name for info in checkpointing.list_checkpoints(folder)]
    return sorted(name for name in found if not name.startswith("checkpoint_"))


@pytest.mark.parametrize(
    ("k", "steps", "max_steps", "expected"),
    [
        (1, 2, 6, [2, 4, 6]),
        (2, 1, 6, [2, 4, 6]),
        (2, 2, 10, [4, 8, 10]),
        (3, 1, 4, [3, 4]),
        (9, 2, 5, [5]),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow_cases(every=4)
def test_one_is_written_after_every_kth_and_the_last(
    make, batches, k, steps, max_steps, expected, asynchronous
):
    checkpoint = Checkpoint(steps=steps, asynchronous=asynchronous)
    trainer = make(SaveCheckpointState(k), checkpoint=checkpoint, max_steps=max_steps)
    trainer.fit(batches)
    assert names(trainer.model_dir) == sorted(f"model_checkpoint_{step}" for step in expected)


def test_without_checkpoints_there_is_none(make, batches):
    trainer = make(SaveCheckpointState(1))
    trainer.fit(batches)
    assert names(trainer.model_dir) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_has_the_parts_of_its_checkpoint(make, batches, asynchronous):
    checkpoint = Checkpoint(steps=1, asynchronous=asynchronous)
    trainer = make(SaveCheckpointState(1), checkpoint=checkpoint, max_steps=3)
    trainer.fit(batches)
    whole = checkpointing.load(trainer.model_dir / "checkpoint_2")
    part = checkpointing.load(trainer.model_dir / "model_checkpoint_2")
    assert list(part) == ["model"]
    assert part["model"].keys() == whole["model"].keys()
    assert all(torch.equal(part["model"][name], value) for name, value in whole["model"].items())


@pytest.mark.parametrize(
    "states", ["model,optimizer", ["model", "optimizer"], " model , optimizer"]
)
def test_several_parts_are_named_in_the_name(make, batches, states):
    trainer = make(SaveCheckpointState(1, states), checkpoint=Checkpoint(steps=2), max_steps=2)
    trainer.fit(batches)
    part = checkpointing.load(trainer.model_dir / "model_optimizer_checkpoint_2")
    assert sorted(part) == ["model", "optimizer"]


def test_parts_with_two_underscores_are_always_there(make, batches):
    class Extra(Callback):
        def on_save_checkpoint(self, trainer, state_dict):
            state_dict["__metadata__"] = {"version": 3}
            state_dict["extra"] = 1

    trainer = make(Extra(), SaveCheckpointState(1), checkpoint=Checkpoint(steps=2), max_steps=2)
    trainer.fit(batches)
    part = checkpointing.load(trainer.model_dir / "model_checkpoint_2")
    assert sorted(part) == ["__metadata__", "model"]
    assert part["__metadata__"] == {"version": 3}


def test_its_name_can_be_chosen(make, batches):
    callback = SaveCheckpointState(1, checkpoint_name="{ckpt_name}.{checkpoint_states}")
    trainer = make(callback, checkpoint=Checkpoint(steps=2), max_steps=2)
    trainer.fit(batches)
    assert (trainer.model_dir / "checkpoint_2.model").is_dir()


def test_a_run_can_start_from_it(make, batches, tmp_path):
    first = make(SaveCheckpointState(1), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    second = make(model_dir=tmp_path / "second", max_steps=1)
    second.load_checkpoint(first.model_dir / "model_checkpoint_2")
    assert second.global_step == 0
    assert torch.equal(second.model.head.weight, first.model.head.weight)


def test_a_run_does_not_continue_from_it_by_itself(make, batches):
    make(SaveCheckpointState(1), checkpoint=Checkpoint(steps=2), max_steps=4).fit(batches)
    again = make(SaveCheckpointState(1), checkpoint=Checkpoint(steps=2), max_steps=5)
    assert again.checkpoint.get_latest_checkpoint(again).name == "checkpoint_4"


@pytest.mark.parametrize("in_front", [True, False])
def test_it_stays_when_its_checkpoint_goes(make, batches, in_front):
    callbacks = [SaveCheckpointState(1), KeepNCheckpoints(1)]
    trainer = make(
        *(callbacks if in_front else callbacks[::-1]), checkpoint=Checkpoint(steps=1), max_steps=3
    )
    trainer.fit(batches)
    found = [info.path.name for info in checkpointing.list_checkpoints(trainer.model_dir)]
    assert sorted(found) == ["checkpoint_3", *(f"model_checkpoint_{step}" for step in (1, 2, 3))]


# ---- after a restart


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Raise at a step boundary, after the checkpoint, or between it and its copy."""

    def __init__(self, step, between=False):
        self.step, self.between = step, between

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == self.step and not self.between:
            raise Crash

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        if trainer.global_step == self.step and self.between:
            raise Crash


@pytest.mark.slow_cases("*-2-*", "*-4-*", "1-6-*", "2-*-False", "3-8-*", every=4)
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("step", [2, 4, 6, 8])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_run_that_was_broken_counts_on_and_lacks_none(make, batches, tmp_path, k, step, between):
    def run(*callbacks, **settings):
        checkpoint = Checkpoint(steps=2)
        return make(
            *callbacks, SaveCheckpointState(k), checkpoint=checkpoint, max_steps=10, **settings
        )

    whole = run(model_dir=tmp_path / "whole")
    whole.fit(batches)
    with pytest.raises(Crash):
        run(CrashAt(step, between)).fit(batches)
    trainer = run()
    trainer.fit(batches)
    assert names(trainer.model_dir) == names(whole.model_dir)


def test_a_run_that_starts_from_anothers_checkpoint_begins_to_count(make, batches, tmp_path):
    first = make(SaveCheckpointState(2), checkpoint=Checkpoint(steps=1), max_steps=3)
    first.fit(batches)
    other = make(
        SaveCheckpointState(2),
        checkpoint=Checkpoint(steps=1),
        max_steps=6,
        model_dir=tmp_path / "other",
    )
    other.fit(batches, ckpt_path=first.model_dir / "checkpoint_3")
    assert names(other.model_dir) == ["model_checkpoint_5", "model_checkpoint_6"]


def test_an_interrupted_run_is_not_at_its_very_last(make, batches):
    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.early_exit.interrupt("SIGUSR1")

    trainer = make(Interrupt(), SaveCheckpointState(2), checkpoint=Checkpoint(steps=2))
    trainer.fit(batches)
    assert (trainer.model_dir / "checkpoint_3").is_dir()
    assert names(trainer.model_dir) == ["model_checkpoint_3"]  # it is the second one


def test_an_early_end_is_the_very_last(make, batches):
    class Stop(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3:
                trainer.early_exit.stop("enough")

    trainer = make(Stop(), SaveCheckpointState(9), checkpoint=Checkpoint(steps=2))
    trainer.fit(batches)
    assert names(trainer.model_dir) == ["model_checkpoint_3"]


# ---- invalid arguments


def test_a_part_that_is_not_there_is_reported_at_the_first_checkpoint(make, batches):
    trainer = make(SaveCheckpointState(9, "modle"), checkpoint=Checkpoint(steps=1))
    with pytest.raises(ConfigError, match=r"has no state 'modle'\. Did you mean 'model'\?"):
        trainer.fit(batches)
    assert trainer.global_step == 1


def test_the_parts_that_there_are_are_named(make, batches):
    trainer = make(SaveCheckpointState(1, "weights"), checkpoint=Checkpoint(steps=1))
    with pytest.raises(ConfigError, match=r"Known: .*dataloader, global_step, model, optimizer"):
        trainer.fit(batches)


def test_a_disk_error_is_reported_and_the_run_continues(make, batches, monkeypatch, caplog):
    save = checkpointing.save

    def refuse(path, state, **settings):
        if path.name == "model_checkpoint_2":
            raise CheckpointError("no space") from OSError(28, "No space left on device")
        return save(path, state, **settings)

    monkeypatch.setattr(checkpointing, "save", refuse)
    trainer = make(SaveCheckpointState(1), checkpoint=Checkpoint(steps=2))
    trainer.fit(batches)
    assert "model_checkpoint_2: no space" in caplog.text
    assert names(trainer.model_dir) == ["model_checkpoint_4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: expected .*> 0.*, got 0"),
        ({"k": True}, "k: expected .*, got true"),
        ({"checkpoint_states": []}, "of a checkpoint, such as 'model'"),
        ({"checkpoint_states": "model,,x"}, "of a checkpoint, such as 'model'"),
        ({"checkpoint_name": "{ckpt_name}"}, "{checkpoint_states} and {ckpt_name}, once"),
        ({"checkpoint_name": "a/{ckpt_name}{checkpoint_states}"}, "expected a file name"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SaveCheckpointState(**({"k": 1} | arguments))
