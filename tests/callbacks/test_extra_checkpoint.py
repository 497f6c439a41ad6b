"""Additional checkpoints besides those of the run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.errors import CheckpointError, ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Weights(Callback):
    """Record the weights by step."""

    def __init__(self):
        self.by_step = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        state = model.state_dict()
        self.by_step[trainer.global_step] = {name: value.clone() for name, value in state.items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


class Crash(Exception):
    pass


class CrashAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            raise Crash


def test_two_of_them_write_at_their_own_times(make, batches):
    weights = Weights()
    trainer = make(
        weights,
        ExtraCheckpoint(steps=2),
        ExtraCheckpoint(steps=3, file_format="safetensors", folder="export"),
        checkpoint=Checkpoint(steps=4),
        max_steps=6,
    )
    trainer.fit(batches)
    root = trainer.model_dir
    assert names(root / "extra") == ["extra_2", "extra_4", "extra_6"]
    assert names(root / "export") == ["extra_3.safetensors", "extra_6.safetensors"]
    assert trainer.checkpoint.get_latest_checkpoint(trainer).name == "checkpoint_6"
    state = checkpointing.load(root / "extra" / "extra_4")
    assert state.keys() == {"model"}
    assert equal(state["model"], weights.by_step[4])
    assert equal(load_file(root / "export" / "extra_3.safetensors"), weights.by_step[3])


def test_it_writes_at_the_end_of_passes_and_of_the_run(make, batches):
    loop = TrainingLoop(num_epochs=3, steps_per_epoch=2)
    trainer = make(
        ExtraCheckpoint(epochs=2, folder="passes"),
        ExtraCheckpoint(at_end=True, folder="end"),
        ExtraCheckpoint(steps=6, at_end=True, folder="both"),
        loop=loop,
    )
    trainer.fit(batches)
    assert names(trainer.model_dir / "passes") == ["extra_4"]
    assert names(trainer.model_dir / "end") == ["extra_6"]
    assert names(trainer.model_dir / "both") == ["extra_6"]


def test_the_label_counts_updates_not_batches(make, batches):
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    trainer = make(ExtraCheckpoint(steps=2), loop=loop)
    trainer.fit(batches)
    assert names(trainer.model_dir / "extra") == ["extra_2", "extra_4"]


@pytest.mark.parametrize("file_format", ["checkpoint", "safetensors"])
def test_only_the_newest_are_kept(make, batches, file_format):
    extra = ExtraCheckpoint(steps=1, keep=2, file_format=file_format)
    trainer = make(extra)
    trainer.fit(batches)
    suffix = ".safetensors" if file_format == "safetensors" else ""
    assert names(trainer.model_dir / "extra") == [f"extra_3{suffix}", f"extra_4{suffix}"]


def test_a_run_resumes_from_its_own_checkpoints_and_from_these_if_given(make, batches, tmp_path):
    seen = []

    class See(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            seen.append(trainer.global_step)

    def run(folder, *callbacks):
        extra = ExtraCheckpoint(steps=3, checkpoint_states="all")
        settings = {"checkpoint": Checkpoint(steps=2), "model_dir": tmp_path / folder}
        return make(*callbacks, extra, See(), **settings)

    unbroken, broken = run("unbroken"), run("broken")
    unbroken.fit(batches)
    broken.add_callback(CrashAt(3))
    with pytest.raises(Crash):
        broken.fit(batches)
    broken.close()
    resumed, told = run("broken"), run("told")
    resumed.fit(batches)
    told.fit(batches, ckpt_path=tmp_path / "unbroken" / "extra" / "extra_3")
    assert seen == [0, 0, 2, 3]
    expected = dict(unbroken.model.state_dict())
    assert equal(dict(resumed.model.state_dict()), expected)
    assert equal(dict(told.model.state_dict()), expected)


@pytest.mark.parametrize("file_format", ["checkpoint", "safetensors"])
def test_a_run_that_resumes_leaves_what_the_unbroken_one_leaves(
    make, batches, tmp_path, file_format
):
    def run(folder, *others):
        extra = ExtraCheckpoint(steps=1, keep=3, file_format=file_format)
        settings = {"checkpoint": Checkpoint(steps=2), "max_steps": 6}
        return make(*others, extra, model_dir=folder, **settings)

    unbroken = run(tmp_path / "unbroken")
    unbroken.fit(batches)
    broken = run(tmp_path / "broken")
    broken.add_callback(CrashAt(5))
    with pytest.raises(Crash):
        broken.fit(batches)
    broken.close()
    run(tmp_path / "broken").fit(batches)
    assert names(tmp_path / "broken" / "extra") == names(tmp_path / "unbroken" / "extra")


def test_another_run_in_the_folder_overwrites_nothing(make, batches):
    trainer = make(ExtraCheckpoint(steps=4))
    trainer.fit(batches)
    trainer.close()
    make(ExtraCheckpoint(steps=4)).fit(batches, ckpt_path=None)
    assert names(trainer.model_dir / "extra") == ["extra_4", "extra_4_2"]


def test_the_averaged_weights_can_be_written(make, batches):
    ema, weights = ModelEma(0.5), Weights()
    extra = ExtraCheckpoint(steps=4, file_format="safetensors", averaged=True)
    trainer = make(weights, ema, extra)
    trainer.fit(batches)
    found = load_file(trainer.model_dir / "extra" / "extra_4.safetensors")
    assert equal(found, ema.average.state_dict()["average"])
    assert not torch.equal(found["head.weight"], weights.by_step[4]["head.weight"])
    assert equal(dict(trainer.model.state_dict()), weights.by_step[4])


def test_a_disk_error_does_not_end_the_run(make, batches, caplog, monkeypatch):
    def refuse(*args, **kwargs):
        raise CheckpointError("no") from OSError("full")

    monkeypatch.setattr(checkpointing, "save", refuse)
    trainer = make(ExtraCheckpoint(steps=2))
    trainer.fit(batches)
    assert trainer.global_step == 4
    assert "extra_2: no" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_at_once(make, batches):
    trainer = make(ExtraCheckpoint(steps=2))
    (trainer.model_dir / "extra").write_text("")
    with pytest.raises(ConfigError, match=r"ExtraCheckpoint\.folder: .* is not writable"):
        trainer.fit(batches)


def test_a_part_that_is_not_there_is_refused_with_the_nearest_name(make, batches):
    with pytest.raises(ConfigError, match=r"has no state 'optimiser'\. Did you mean 'optimizer'"):
        make(ExtraCheckpoint(steps=2, checkpoint_states="optimiser")).fit(batches)


def test_the_name_of_the_runs_own_checkpoints_is_refused(make):
    with pytest.raises(ConfigError, match="one of the run's own checkpoints"):
        make(ExtraCheckpoint(steps=1, folder=".", checkpoint_name="checkpoint_{step}"))


def test_two_under_the_same_names_are_refused(make):
    with pytest.raises(ConfigError, match="Two ExtraCheckpoint callbacks use"):
        make(ExtraCheckpoint(steps=1), ExtraCheckpoint(steps=2))


def test_averages_need_who_makes_them(make):
    with pytest.raises(ConfigError, match=r"ExtraCheckpoint.averaged requires .*ModelEma"):
        make(ExtraCheckpoint(steps=1, averaged=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": None}, "Set steps, epochs or at_end"),
        ({"steps": 0}, r"steps: expected .*> 0.*, got 0"),
        ({"epochs": True}, r"epochs: expected .*, got true"),
        ({"keep": 0}, r"keep: expected .*, got 0"),
        ({"file_format": "pt"}, r"file_format: expected 'checkpoint' or 'safetensors', got 'pt'"),
        ({"checkpoint_name": "extra"}, r"expected a file name with {step}, once, got 'extra'"),
        ({"checkpoint_states": ""}, r"of a checkpoint, such as 'model'"),
        (
            {"file_format": "safetensors", "checkpoint_states": "all"},
            r"'all' cannot be combined with file_format: safetensors.* 'model'",
        ),
        (
            {"averaged": True, "checkpoint_states": "all"},
            r"'all' cannot be combined with averaged: true",
        ),
        ({"folder": "/tmp"}, r"folder: expected a path within model_dir, .*, got '/tmp'"),
        ({"folder": "../x"}, r"folder: expected .*, got '../x'"),
        ({"folder": ""}, r"folder: expected .*, got ''"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ExtraCheckpoint(**({"steps": 2} | arguments))


def test_a_checkpoint_does_not_have_the_name_of_a_file_of_weights():
    with pytest.raises(ConfigError, match=r"Remove \.safetensors"):
        ExtraCheckpoint(steps=1, checkpoint_states="all", checkpoint_name="a_{step}.safetensors")


@pytest.mark.parametrize(
    "arguments", [{"checkpoint_states": None}, {"checkpoint_states": [1]}, {"checkpoint_name": 5}]
)
def test_an_argument_of_another_type_is_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ExtraCheckpoint(steps=1, **arguments)


def test_one_process_writes_a_file_of_weights_once(make, batches, monkeypatch):
    monkeypatch.setattr(checkpointing, "save", None)
    trainer = make(ExtraCheckpoint(steps=4, file_format="safetensors"))
    trainer.fit(batches)
    found = load_file(trainer.model_dir / "extra" / "extra_4.safetensors")
    assert equal(found, trainer.model.state_dict())
