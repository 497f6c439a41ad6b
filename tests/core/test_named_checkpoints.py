"""The checkpoints that `ckpt_path` names."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from modelzoo_trainer import (
    Checkpoint,
    CheckpointError,
    ConfigError,
    TrainingLoop,
    checkpointing,
)
from modelzoo_trainer.callbacks import SaveBest
from tests.callbacks.test_save_best import Score
from tests.doubles import tiny_batches

BATCHES = tiny_batches(4)


def trained(trainer_of, folder, values, *callbacks, **settings):
    """Train one step per value, which is the metric `score` after it."""
    plan = {
        "loop": TrainingLoop(num_steps=len(values), eval_frequency=1),
        "checkpoint": Checkpoint(steps=2),
        "model_dir": folder,
    }
    trainer = trainer_of(Score(*values), *callbacks, **(plan | settings))
    trainer.fit(BATCHES, BATCHES[:1])
    return trainer


def weights(trainer):
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


def loaded(trainer_of, folder, ckpt_path, *callbacks):
    """Return the step of the checkpoint that a new trainer uses."""
    trainer = trainer_of(*callbacks, model_dir=folder)
    trainer.validate(BATCHES, ckpt_path=ckpt_path)
    return trainer.global_step


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_new_trainer_finds_the_best_checkpoint(trainer_of, tmp_path, mode: str) -> None:
    best = SaveBest("score", mode, k=3)
    trainer = trained(trainer_of, tmp_path, [3.0, 1.0, 5.0, 2.0], best)
    step = {"min": 2, "max": 3}[mode]
    assert best.best_path == tmp_path / f"best_{step}"
    assert trainer.result.best_checkpoint == best.best_path
    assert loaded(trainer_of, tmp_path, "best") == step
    assert loaded(trainer_of, tmp_path, "last") == 4
    assert loaded(trainer_of, tmp_path, ...) == 4


def test_every_method_takes_the_names(trainer_of, tmp_path) -> None:
    trained(trainer_of, tmp_path, [1.0, 2.0, 3.0], SaveBest("score"))
    for use in ("test", "predict", "validate"):
        trainer = trainer_of(model_dir=tmp_path)
        getattr(trainer, use)(BATCHES, ckpt_path="best")
        assert trainer.global_step == 1
        getattr(trainer, use)(BATCHES, ckpt_path="last")  # also if something is loaded already
        assert trainer.global_step == 3
    trainer = trainer_of(model_dir=tmp_path, loop=TrainingLoop(num_steps=2))
    trainer.fit(BATCHES, ckpt_path="best")
    assert trainer.checkpoint.begun_with == (tmp_path / "best_1", 1)


def test_the_last_one_is_used_even_without_autoload(trainer_of, tmp_path) -> None:
    trained(trainer_of, tmp_path, [1.0, 2.0])
    trainer = trainer_of(model_dir=tmp_path, checkpoint=Checkpoint(autoload_last_checkpoint=False))
    trainer.validate(BATCHES, ckpt_path="last")
    assert trainer.global_step == 2


def test_a_fit_may_ask_for_the_last_one_before_there_is_one(trainer_of, tmp_path) -> None:
    trainer = trainer_of(model_dir=tmp_path, loop=TrainingLoop(num_steps=2))
    assert trainer.fit(BATCHES, ckpt_path="last").steps == 2
    with pytest.raises(CheckpointError, match=r"'last'.*no checkpoint in"):
        trainer_of(model_dir=tmp_path).test(BATCHES, ckpt_path="last")


def test_several_metrics_require_a_choice(trainer_of, tmp_path) -> None:
    one = SaveBest("score")
    other = SaveBest("score", "max", checkpoint_name="top_{step}")
    third = SaveBest("validate_0/loss", "max", checkpoint_name="worst_{step}")
    trained(trainer_of, tmp_path, [2.0, 1.0, 3.0], one, third)
    with pytest.raises(ConfigError, match=r"'best' is ambiguous.*'score'.*'validate_0/loss'"):
        loaded(trainer_of, tmp_path, "best")
    assert loaded(trainer_of, tmp_path, "best", SaveBest("score")) == 2
    worst = third.best[0]["step"]
    assert loaded(trainer_of, tmp_path, "best", SaveBest("validate_0/loss", "max")) == worst
    trained(trainer_of, tmp_path / "b", [2.0, 1.0, 3.0], SaveBest("score"), other)
    with pytest.raises(ConfigError, match=r"differ in mode .*top_3"):
        loaded(trainer_of, tmp_path / "b", "best")


def test_an_unknown_mode_is_given_by_a_callback(trainer_of, tmp_path, monkeypatch) -> None:
    trained(trainer_of, tmp_path, [2.0, 1.0, 3.0], SaveBest("score", "max", k=2))
    read = checkpointing.read_manifest

    def without_mode(path):  # as written by an earlier version
        manifest = read(path)
        facts = {name: fact for name, fact in manifest.facts.items() if name != "mode"}
        return dataclasses.replace(manifest, facts=facts)

    monkeypatch.setattr(checkpointing, "read_manifest", without_mode)
    with pytest.raises(ConfigError, match=r"record the mode.*SaveBest\(metric=..., mode=...\)"):
        loaded(trainer_of, tmp_path, "best")
    assert loaded(trainer_of, tmp_path, "best", SaveBest("score", "max")) == 3


def test_validate_all_takes_the_names_among_paths(trainer_of, tmp_path) -> None:
    trained(trainer_of, tmp_path, [1.0, 2.0, 3.0], SaveBest("score"))

    def paths(ckpt_paths):
        trainer = trainer_of(model_dir=tmp_path)
        return [path.name for path in trainer.validate_all(BATCHES, ckpt_paths).per_checkpoint]

    assert paths("best") == ["best_1"]
    assert paths("last") == ["checkpoint_3"]
    assert paths(["best", tmp_path / "checkpoint_2", "last"]) == [
        *("best_1", "checkpoint_2", "checkpoint_3")
    ]
    with pytest.raises(CheckpointError, match=r"'last'.*no checkpoint"):
        trainer_of(model_dir=tmp_path / "empty").validate_all(BATCHES, "last")
    with pytest.raises(ConfigError, match="matches no checkpoint"):
        trainer_of(model_dir=tmp_path).validate_all(BATCHES, tmp_path / "best")


def test_without_a_best_one_the_message_lists_what_is_there(trainer_of, tmp_path) -> None:
    trained(trainer_of, tmp_path, [2.0, 1.0, 3.0])
    with pytest.raises(CheckpointError, match=r"'best'.*checkpoint_2, checkpoint_3.*SaveBest"):
        loaded(trainer_of, tmp_path, "best")
    with pytest.raises(CheckpointError, match=r"by 'score'.*checkpoint_2, checkpoint_3"):
        loaded(trainer_of, tmp_path, "best", SaveBest("score"))


def test_a_folder_without_checkpoints_may_be_the_wrong_one(trainer_of, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in '.*empty'.*right") as caught:
        loaded(trainer_of, tmp_path / "empty", "best", SaveBest("score"))
    assert "Add the callback" not in str(caught.value)


def test_a_missing_checkpoint_is_answered_with_those_beside_it(trainer_of, tmp_path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    trained(trainer_of, run, [2.0, 1.0])
    with pytest.raises(CheckpointError, match=r"_9' does not exist.*run': checkpoint_2\."):
        loaded(trainer_of, run, run / "checkpoint_9")
    with pytest.raises(CheckpointError, match=r"no folder '.*other'.*Newest.*run/checkpoint_2'"):
        loaded(trainer_of, run, other / "checkpoint_1")


def test_a_new_process_says_that_the_best_one_is_not_used(
    trainer_of, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(trainer_of, tmp_path, [1.0, 2.0, 3.0], SaveBest("score", load_best=True))
    caplog.set_level(logging.INFO)
    trainer = trainer_of(SaveBest("score", load_best=True), model_dir=tmp_path)
    caplog.clear()
    trainer.predict(BATCHES)
    assert trainer.global_step == 3
    [line] = [one for one in caplog.messages if "best_1" in one]
    assert "Using checkpoint_3," in line
    assert "ckpt_path='best'" in line
    assert "--checkpoint_path best" in line
    caplog.clear()
    trainer.predict(BATCHES, ckpt_path="best")
    assert not [one for one in caplog.messages if "ckpt_path='best'" in one]


def test_the_names_are_no_paths(trainer_of, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trained(trainer_of, tmp_path / "a", [2.0, 1.0, 3.0], SaveBest("score"))
    trainer.checkpoint.checkpoint_name = "best{step}"
    expected = weights(trainer)
    path = trainer.save_checkpoint().relative_to(tmp_path)
    trainer.validate(BATCHES, ckpt_path="best")
    assert not torch.equal(weights(trainer), expected)
    trainer.validate(BATCHES, ckpt_path=f"./{path}")
    assert torch.equal(weights(trainer), expected)


@pytest.mark.parametrize("given", [True, False, 7, BATCHES])
def test_another_type_is_refused(trainer_of, given) -> None:
    trainer = trainer_of()
    kind = repr(given) if isinstance(given, bool) else type(given).__name__
    for use in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ConfigError, match=rf"ckpt_path got .*{kind}.*'last', 'best', or None"):
            use(BATCHES, ckpt_path=given)
    assert trainer.global_step == 0
