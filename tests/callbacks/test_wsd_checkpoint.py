"""Checkpoints before and after the decays of a learning rate."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks.wsd_checkpoint import WSDCheckpoint
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.decay import LinearLR
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def wsd(total=20, ratio=0.2, **arguments):
    return lambda optimizer: WarmupStableDecay(
        optimizer, 0.1, total, decay_ratio=ratio, **arguments
    )


@pytest.fixture
def run(make):
    def run(*callbacks, total=20, steps=None, schedule=None, **settings):
        return make(
            *callbacks,
            schedulers=schedule or wsd(total),
            loop=TrainingLoop(max_steps=steps or total),
            **settings,
        )

    return run


def test_the_state_is_written_before_the_decay_and_the_weights_after_it(run, batches):
    trainer = run(WSDCheckpoint())
    trainer.fit(batches * 2)
    folder = trainer.model_dir / "wsd"
    assert names(folder) == ["decayed_20.safetensors", "stable_16"]
    state = checkpointing.load(folder / "stable_16")
    assert state["global_step"] == 16
    assert {"model", "optimizer", "schedulers"} <= state.keys()
    found = load_file(folder / "decayed_20.safetensors")
    assert all(torch.equal(found[k], v) for k, v in trainer.model.state_dict().items())
    assert trainer.checkpoint.get_latest_checkpoint(trainer) is None


def test_each_decay_has_both(run, batches):
    schedule = wsd(ratio=0.2, checkpoint_steps=[5, 10])
    trainer = run(WSDCheckpoint(folder="mine", stable_name="s{step}"), schedule=schedule)
    trainer.fit(batches * 2)
    assert names(trainer.model_dir / "mine") == [
        "decayed_10.safetensors",
        "decayed_20.safetensors",
        "decayed_5.safetensors",
        "s16",
        "s4",
        "s8",
    ]


def test_a_longer_run_from_before_the_decay_is_what_it_would_have_been(run, batches, tmp_path):
    short = run(WSDCheckpoint(), total=10, model_dir=tmp_path / "short")
    short.fit(batches * 2)
    longer = run(WSDCheckpoint(), total=20, model_dir=tmp_path / "longer")
    longer.fit(batches * 2, ckpt_path=tmp_path / "short" / "wsd" / "stable_8")
    whole = run(WSDCheckpoint(), total=20, model_dir=tmp_path / "whole")
    whole.fit(batches * 2)
    assert longer.global_step == 20
    for first, second in zip(whole.model.parameters(), longer.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert names(tmp_path / "longer" / "wsd") == ["decayed_20.safetensors", "stable_16"]


def test_the_finished_weights_can_be_begun_with(run, batches, tmp_path):
    first = run(WSDCheckpoint(), total=5)
    first.fit(batches)
    other = run(total=5, model_dir=tmp_path / "other", seed=3)
    other.validate(batches[:1], ckpt_path=first.model_dir / "wsd" / "decayed_5.safetensors")
    for one, two in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_comes_again_after_a_restart_replaces_what_was_there(run, batches):
    class Crash(Exception):
        pass

    class CrashAt(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 18:
                raise Crash

    broken = run(WSDCheckpoint(), CrashAt(), checkpoint=Checkpoint(steps=6))
    with pytest.raises(Crash):
        broken.fit(batches * 2)
    broken.close()
    trainer = run(WSDCheckpoint(), checkpoint=Checkpoint(steps=6))
    trainer.fit(batches * 2)
    assert names(trainer.model_dir / "wsd") == ["decayed_20.safetensors", "stable_16"]


@pytest.mark.parametrize(
    ("schedulers", "known"),
    [
        (lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 5), "LinearLR"),
        (None, "none"),
    ],
)
def test_another_scheduler_is_refused(make, schedulers, known):
    message = f"get_checkpoint_steps, .* schedulers: {known}"
    with pytest.raises(ConfigError, match=message):
        make(WSDCheckpoint(), schedulers=schedulers)


def test_the_name_of_the_runs_own_checkpoints_is_refused(run):
    with pytest.raises(ConfigError, match="one of the run's own checkpoints"):
        run(WSDCheckpoint(folder=".", stable_name="checkpoint_{step}"))


@pytest.mark.parametrize("name", ["stable_name", "decayed_name"])
def test_a_name_without_the_step_is_refused(name):
    with pytest.raises(ConfigError, match=rf"WSDCheckpoint\.{name}: expected .*, got 'last'"):
        WSDCheckpoint(**{name: "last"})


def test_a_checkpoint_does_not_have_the_name_of_a_file_of_weights():
    with pytest.raises(ConfigError, match=r"Remove \.safetensors"):
        WSDCheckpoint(stable_name="stable_{step}.safetensors")


def test_two_of_them_are_refused(run):
    with pytest.raises(ConfigError, match="two WSDCheckpoint"):
        run(WSDCheckpoint(), WSDCheckpoint(folder="other"))
