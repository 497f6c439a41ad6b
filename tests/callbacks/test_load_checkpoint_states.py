"""Loading of parts of a checkpoint, and of all of the run's own."""

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, RollBack
from modelzoo_trainer.callbacks import LoadCheckpointStates
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from tests.doubles import TinyModel, differing, make_trainer, run_trainer, tiny_batches, weights_of


@pytest.fixture
def saved(tmp_path):
    trainer = run_trainer(tmp_path / "first", max_steps=3, checkpoint=Checkpoint(steps=3))
    return trainer, tmp_path / "first" / "checkpoint_3"


@pytest.mark.parametrize("states", ["model", ["model"], " model "])
def test_the_model_alone_begins_at_step_0(tmp_path, saved, states):
    first, path = saved
    second = make_trainer(tmp_path / "second", LoadCheckpointStates(states), max_steps=2)
    second.load_checkpoint(path)
    assert second.global_step == 0
    assert differing(weights_of(first), weights_of(second)) == []


def test_several_parts_are_loaded(tmp_path, saved):
    _, path = saved
    second = make_trainer(tmp_path / "second", LoadCheckpointStates("model,global_step"))
    second.load_checkpoint(path)
    assert second.global_step == 3


def test_all_is_all(tmp_path, saved):
    _, path = saved
    second = make_trainer(tmp_path / "second", LoadCheckpointStates())
    second.load_checkpoint(path)
    assert second.global_step == 3


def test_a_run_resumes_from_its_own_checkpoint_with_all_of_it(tmp_path, saved):
    _, path = saved
    settings = {"max_steps": 4, "checkpoint": Checkpoint(steps=2)}
    callback = LoadCheckpointStates("model")
    first = make_trainer(tmp_path / "second", callback, **settings | {"max_steps": 2})
    first.fit(tiny_batches(), ckpt_path=path)
    assert first.global_step == 2
    again = make_trainer(tmp_path / "second", LoadCheckpointStates("model"), **settings)
    again.fit(tiny_batches())
    assert again.global_step == 4
    assert again.data.num_batches == 4


def test_a_part_that_is_not_there_is_refused_and_nothing_is_changed(tmp_path, saved):
    _, path = saved
    second = make_trainer(tmp_path / "second", LoadCheckpointStates("modl"), model=TinyModel)
    before = weights_of(second)
    with pytest.raises(CheckpointMismatch, match=r"has no state 'modl'\. Did you mean 'model'"):
        second.load_checkpoint(path)
    assert all(torch.equal(before[name], value) for name, value in weights_of(second).items())


@pytest.mark.parametrize("states", ["", [], "model,,optimizer"])
def test_no_part_at_all_is_refused(states):
    with pytest.raises(ConfigError, match="of a checkpoint, such as 'model'"):
        LoadCheckpointStates(states)


@pytest.mark.parametrize("part", ["rng", "dataloader", "schedule", "global_step", "optimizer"])
@pytest.mark.slow_cases(every=4)
def test_every_part_can_be_named(tmp_path, saved, part):
    _, path = saved
    second = make_trainer(tmp_path / "second", LoadCheckpointStates(f"model,{part}"))
    second.load_checkpoint(path)
    assert second.global_step == (3 if part == "global_step" else 0)


def test_a_run_that_goes_back_takes_all_of_its_own_checkpoint(tmp_path, saved):
    class GoBack(Callback):
        def __init__(self):
            self.steps = []

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.steps.append(trainer.global_step)
            if self.steps == [1, 2, 3, 4, 5]:
                found = RuntimeError("nowhere to go back to")
                raise RollBack("bad", step=5, batches=[], cause=found)

    _, path = saved
    go_back = GoBack()
    second = make_trainer(
        tmp_path / "second",
        LoadCheckpointStates("model"),
        go_back,
        max_steps=6,
        checkpoint=Checkpoint(steps=2),
    )
    second.fit(tiny_batches(), ckpt_path=path)
    assert go_back.steps == [1, 2, 3, 4, 5, 5, 6]
