"""Checkpoints that lack a part, or that a newer version has written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import xxhash

from modelzoo_trainer import Callback, Checkpoint, CheckpointError, checkpointing
from modelzoo_trainer.callbacks import ExtraCheckpoint, LoadCheckpointStates, SaveBest
from modelzoo_trainer.errors import NewerFormat
from tests.doubles import differing, tiny_batches, weights_of

BATCHES = tiny_batches(10)


class Without(Callback):
    """Takes a part out of each checkpoint that is saved."""

    def __init__(self, key):
        self.key = key

    def postprocess_checkpoint(self, trainer, state_dict):
        state_dict.pop(self.key)


class Ignore(Without):
    """Takes a part out of each checkpoint that is loaded."""

    def postprocess_checkpoint(self, trainer, state_dict):
        pass

    def preprocess_checkpoint(self, trainer, state_dict):
        state_dict.pop(self.key)


ALWAYS = ["model", "optimizer", "global_step", "dataloader", "schedulers", "rng"]


@pytest.mark.parametrize("key", ALWAYS)
@pytest.mark.slow_cases(every=4)
def test_a_run_does_not_continue_without_a_part(trainer_of, tmp_path, key):
    trainer_of(Without(key), checkpoint=Checkpoint(steps=5)).fit(BATCHES)
    (path,) = tmp_path.rglob("checkpoint_10")
    with pytest.raises(CheckpointError, match=rf"{path.name}' has no state '{key}'"):
        trainer_of().fit(BATCHES)


@pytest.mark.parametrize("key", ALWAYS)
@pytest.mark.slow_cases(every=4)
def test_what_a_user_takes_out_when_it_is_loaded_may_be_missing(trainer_of, key):
    trainer_of(checkpoint=Checkpoint(steps=5)).fit(BATCHES)
    trainer_of(Ignore(key)).fit(BATCHES)


def test_without_strict_loading_the_rest_is_used_with_a_warning(trainer_of, caplog):
    trainer_of(Without("optimizer"), checkpoint=Checkpoint(steps=5)).fit(BATCHES)
    again = trainer_of(checkpoint=Checkpoint(disable_strict_checkpoint_loading=True))
    again.fit(BATCHES)
    assert "has no state 'optimizer'; the run starts without it" in caplog.text


def test_a_validation_needs_the_model_only(trainer_of):
    trainer_of(Without("optimizer"), checkpoint=Checkpoint(steps=5)).fit(BATCHES)
    trainer_of().validate(BATCHES)
    shutil.rmtree(trainer_of().model_dir)
    trainer_of(Without("model"), checkpoint=Checkpoint(steps=5)).fit(BATCHES)
    with pytest.raises(CheckpointError, match="has no state 'model'"):
        trainer_of().validate(BATCHES)


def test_parts_that_were_saved_on_purpose_can_be_loaded(trainer_of, tmp_path):
    extra = ExtraCheckpoint(steps=10, checkpoint_states="model")
    parts = ExtraCheckpoint(steps=10, checkpoint_states="model,global_step", folder="parts")
    first = trainer_of(extra, parts, model_dir=tmp_path / "first")
    first.fit(BATCHES)
    weights = trainer_of(model_dir=tmp_path / "weights")
    weights.load_checkpoint(tmp_path / "first/extra/extra_10")
    assert differing(weights_of(first), weights_of(weights)) == []
    path = tmp_path / "first/parts/extra_10"
    with pytest.raises(CheckpointError, match="no state 'dataloader', 'schedulers', 'rng', 'opt"):
        trainer_of(model_dir=tmp_path / "a").fit(BATCHES, ckpt_path=path)
    chosen = LoadCheckpointStates("model,global_step")
    second = trainer_of(chosen, model_dir=tmp_path / "b")
    second.fit(BATCHES, ckpt_path=path)
    assert second.global_step == 20


# ---- newer versions


def make_newer(path: Path, *, is_damage: bool = False) -> None:
    """Give a checkpoint the next format version, with the right digest unless it is damage."""
    file = path / "manifest.json"
    text = file.read_text()
    manifest = json.loads(text)
    version = manifest["format_version"]
    if is_damage:
        changed = text.replace(f'"format_version": {version}', f'"format_version": {version + 1}')
    else:
        del manifest["xxh3_128"]
        manifest["format_version"] = version + 1
        digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())
        changed = json.dumps(manifest | {"xxh3_128": digest}, indent=1, sort_keys=True) + "\n"
    file.write_text(changed)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("checkpoint_*"))


def test_the_newest_checkpoint_of_a_newer_version_is_not_passed_over(trainer_of):
    trainer = trainer_of(checkpoint=Checkpoint(steps=5))
    trainer.fit(BATCHES)
    make_newer(trainer.model_dir / "checkpoint_10")
    again = trainer_of(checkpoint=Checkpoint(steps=5))
    for method in (again.fit, again.validate):
        with pytest.raises(NewerFormat, match=r"checkpoint_10' has format version 3;.*ckpt_path"):
            method(BATCHES)
    assert names(trainer.model_dir) == ["checkpoint_10", "checkpoint_5"]
    again.fit(BATCHES, ckpt_path=trainer.model_dir / "checkpoint_5")
    assert again.global_step == 10


def test_a_damaged_version_is_damage(trainer_of, caplog):
    trainer = trainer_of(checkpoint=Checkpoint(steps=5))
    trainer.fit(BATCHES)
    make_newer(trainer.model_dir / "checkpoint_10", is_damage=True)
    trainer_of().fit(BATCHES)
    assert "Skipped" in caplog.text


def test_the_best_one_may_be_of_a_newer_version(trainer_of):
    best = SaveBest("validate_0/loss", k=9)
    trainer = trainer_of(best, checkpoint=Checkpoint(steps=5))
    trainer.fit(BATCHES, BATCHES[:1])
    make_newer(best.best_path)
    with pytest.raises(NewerFormat, match="format version 3"):
        trainer_of().validate(BATCHES, ckpt_path="best")


def test_a_snapshot_in_memory_of_a_newer_version_is_not_passed_over(trainer_of, tmp_path):
    class Crash(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 7:
                raise KeyError("crash")

    base = tmp_path / "memory"
    base.mkdir()
    memory = {"steps": 3, "path": str(base)}
    with pytest.raises(KeyError):
        trainer_of(Crash(), checkpoint=Checkpoint(steps=5, memory=memory)).fit(BATCHES)
    snapshots = [path.parent for path in base.rglob("manifest.json")]
    assert max(checkpointing.read_manifest(path).step for path in snapshots) == 6
    for path in snapshots:
        make_newer(path)
    with pytest.raises(NewerFormat, match="format version 3"):
        trainer_of(checkpoint=Checkpoint(steps=5, memory=memory)).fit(BATCHES)
