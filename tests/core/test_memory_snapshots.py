"""Snapshots in memory: when they count, and that a run resumes from them exactly."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, checkpointing
from modelzoo_trainer.callbacks import EarlyStopping, KeepNCheckpoints
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.slots import is_in_memory, save_in_place
from modelzoo_trainer.loggers import JsonlLogger
from tests.doubles import Interrupted, differing, tiny_batches, weights_of

BATCHES = tiny_batches(40)


class CrashAt(Callback):
    """Raises when a batch of this step has been trained on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Interrupted


class Start(Callback):
    """Notes where training begins, and what is loaded."""

    def __init__(self) -> None:
        self.step: int | None = None

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        self.step = trainer.global_step


@pytest.fixture
def attempt(trainer_of, memory):
    """Return a function that runs an attempt: its first step, and the trainer."""

    def run(*callbacks: Any, crash: int | None = None, steps: int | None = 10, every=2, **settings):
        start = Start()
        given = {"steps": every, "path": str(memory)} | settings.pop("memory", {})
        checkpoint = Checkpoint(steps=steps, memory=given, **settings.pop("checkpoint", {}))
        fit = {key: settings.pop(key) for key in ("ckpt_path",) if key in settings}
        own = [start, *callbacks] + ([] if crash is None else [CrashAt(crash)])
        trainer = trainer_of(*own, checkpoint=checkpoint, **({"max_steps": 30} | settings))
        try:
            trainer.fit(BATCHES, **fit)
        except Interrupted:
            assert crash is not None
        trainer.close()
        return start.step, trainer

    return run


def snapshots(memory: Path) -> list[int]:
    found = []
    for path in memory.glob("modelzoo_trainer-*/*/memory_*"):
        if (path / "manifest.json").exists():
            assert checkpointing.verify(path) == []
            found.append(checkpointing.read_manifest(path).step)
    return sorted(found)


@pytest.fixture
def unbroken(trainer_of, tmp_path):
    """Return the weights and metrics of a run that nobody ended."""
    trainer = trainer_of(model_dir=tmp_path / "unbroken", max_steps=30)
    trainer.fit(BATCHES)
    return weights_of(trainer)


# ---- resume


def test_a_run_resumes_from_the_newest_snapshot_bitwise(attempt, memory, unbroken) -> None:
    start, _ = attempt(crash=17)
    assert start == 0
    assert snapshots(memory) == [14, 16]
    start, trainer = attempt()
    assert start == 16
    assert differing(weights_of(trainer), unbroken) == []


def test_a_newer_checkpoint_on_disk_is_preferred(attempt, memory, unbroken) -> None:
    attempt(crash=11)
    assert snapshots(memory) == [6, 8]  # step 10 is on disk
    start, trainer = attempt()
    assert start == 10
    assert differing(weights_of(trainer), unbroken) == []


def test_without_checkpoints_on_disk_a_snapshot_is_used(attempt, memory, unbroken) -> None:
    attempt(crash=7, steps=None)
    start, trainer = attempt(steps=None)
    assert start == 6
    assert differing(weights_of(trainer), unbroken) == []


def test_it_is_removed_when_the_run_has_ended_in_order(attempt, memory) -> None:
    attempt(crash=17)
    attempt()
    assert list(memory.glob("*/*")) == []


def test_a_crash_in_the_final_save_leaves_its_checkpoint_after_the_restart(
    attempt, memory, tmp_path, unbroken
) -> None:
    class CrashInSave(Callback):
        def on_save_checkpoint(self, trainer, state_dict):
            if not trainer.checkpoint.is_in_memory:
                raise Interrupted

    final = {"save_final_checkpoint": True}
    attempt(CrashInSave(), crash=31, steps=None, checkpoint=final)
    assert snapshots(memory) == [28, 30]
    _, trainer = attempt(steps=None, checkpoint=final)
    assert differing(weights_of(trainer), unbroken) == []
    assert checkpointing.verify(tmp_path / "run" / "checkpoint_30") == []
    assert list(memory.glob("*/*")) == []


def test_callbacks_whose_state_belongs_to_the_run_resume_too(attempt, tmp_path) -> None:
    def callbacks() -> list[Any]:
        return [EarlyStopping(metric="loss", patience=100), KeepNCheckpoints(2), Counting()]

    attempt(*callbacks(), crash=15, steps=4)
    start, second = attempt(*callbacks(), steps=4)
    assert start == 14
    counted = second.get_callback(Counting)
    assert (counted.loaded, counted.count) == (14, 30)
    kept = [info.step for info in checkpointing.list_checkpoints(tmp_path / "run")]
    assert kept == [28, 30]


class Counting(Callback):
    """Counts batches; its state belongs to the run."""

    state_is_of_run = True

    def __init__(self) -> None:
        self.count = 0
        self.loaded: int | None = None

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = self.loaded = state["count"]


def test_metrics_are_those_of_one_run(attempt, memory, tmp_path) -> None:
    attempt(crash=17, loggers=[JsonlLogger()])
    attempt(loggers=[JsonlLogger()])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
    assert steps == sorted(set(steps))


# ---- what does not count


def test_an_explicit_checkpoint_is_loaded_and_snapshots_are_removed(
    attempt, memory, tmp_path
) -> None:
    attempt(crash=17)
    start, _ = attempt(ckpt_path=tmp_path / "run" / "checkpoint_10", crash=11)
    assert start == 10
    assert snapshots(memory) == []


def test_without_autoload_a_snapshot_is_not_used(attempt, memory) -> None:
    attempt(crash=7)
    start, _ = attempt(checkpoint={"autoload_last_checkpoint": False}, crash=1)
    assert start == 0
    assert snapshots(memory) == []


def test_a_snapshot_of_a_state_that_was_deleted_from_the_disk_does_not_count(
    attempt, tmp_path
) -> None:
    attempt(crash=17)
    shutil.rmtree(tmp_path / "run" / "checkpoint_10")
    start, _ = attempt()
    assert start == 0


def test_a_copy_of_the_folder_is_another_run(attempt, memory, tmp_path) -> None:
    attempt(crash=17)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    start, _ = attempt(model_dir=tmp_path / "copy")
    assert start == 10


def test_a_damaged_snapshot_is_skipped(attempt, memory, caplog) -> None:
    attempt(crash=17)
    newest = max(memory.glob("*/*/memory_*"), key=lambda p: checkpointing.read_manifest(p).step)
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    start, _ = attempt()
    assert start == 14
    assert f"Skipped {newest}" in caplog.text


def test_a_snapshot_from_which_training_failed_twice_is_not_used_again(attempt, memory) -> None:
    attempt(crash=17)
    starts = [attempt(crash=17)[0] for _ in range(3)]
    assert starts == [16, 16, 10]


def test_snapshots_before_a_rollback_are_removed(attempt, memory) -> None:
    seen: list[list[int]] = []

    class Back(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 17:
                seen.append(snapshots(memory))
                trainer.checkpoint.to_roll_back_to(trainer, 17)
                seen.append(snapshots(memory))

    attempt(Back(), crash=18)
    assert seen == [[14, 16], []]


# ---- the disk stays as it is


def test_checkpoints_and_their_hooks_are_as_without(attempt, memory, tmp_path) -> None:
    told: list[int] = []

    class Told(Callback):
        def on_after_save_checkpoint(self, trainer, ckpt_path):
            told.append(trainer.global_step)

    attempt(Told())
    assert told == [10, 20, 30]
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*"))
    assert names == ["checkpoint_10", "checkpoint_20", "checkpoint_30"]


def test_a_snapshot_while_a_checkpoint_is_written_in_the_background(
    attempt, memory, unbroken, monkeypatch
) -> None:
    attempt(crash=17, checkpoint={"asynchronous": True})
    start, trainer = attempt(checkpoint={"asynchronous": True})
    assert start == 16
    assert differing(weights_of(trainer), unbroken) == []


# ---- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "^checkpoint.memory.steps: expected an integer > 0, got 0"),
        ({"path": "/dev/shm"}, "^checkpoint.memory.steps: missing"),
        ({"steps": 5, "pth": "x"}, "^checkpoint.memory.pth: no such setting. Did you mean 'path'"),
        ({"steps": 5, "path": 3}, "^checkpoint.memory.path: "),
        (5, "checkpoint.memory"),
    ],
)
def test_an_invalid_setting_is_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(memory=given)


def test_a_folder_that_does_not_exist_is_refused_before_the_first_step(attempt, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.memory: .*nowhere': it is not a folder"):
        attempt(memory={"path": str(tmp_path / "nowhere")})


def test_too_little_space_is_refused_before_the_first_step(attempt, monkeypatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(
        "modelzoo_trainer.core.parts.memory_snapshots.shutil.disk_usage", lambda path: usage
    )
    with pytest.raises(ConfigError, match="two snapshots take at least"):
        attempt(steps=None)


def test_a_folder_of_another_user_is_refused(attempt, memory) -> None:
    (memory / f"modelzoo_trainer-{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(ConfigError, match="is not a folder that only this user may open"):
        attempt()


def test_a_folder_on_a_disk_is_warned_of(attempt, tmp_path, caplog) -> None:
    if is_in_memory(tmp_path) is not False:
        pytest.skip("temporary files are in memory here")
    (tmp_path / "snapshots").mkdir()
    attempt(memory={"path": str(tmp_path / "snapshots")}, crash=5)
    assert "is on a disk" in caplog.text


def test_memory_that_is_full_ends_the_snapshots_only(
    attempt, memory, caplog, monkeypatch, tmp_path
) -> None:
    write = disk.write

    def refuse(fd, view):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(memory)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, view)

    monkeypatch.setattr(disk, "write", refuse)
    attempt()
    assert caplog.text.count("No more snapshots in memory in this fit") == 1
    assert (tmp_path / "run" / "checkpoint_30").exists()


def test_snapshots_of_runs_that_were_removed_are_removed(attempt, memory, tmp_path) -> None:
    attempt(crash=7)
    shutil.rmtree(tmp_path / "run")
    attempt(crash=3, model_dir=tmp_path / "other")
    assert len(list(memory.glob("*/*"))) == 1


def test_the_same_files_are_written_again(tmp_path) -> None:
    path = tmp_path / "memory_0"
    states = [{"model": {"w": torch.rand(size)}, "x": 1} for size in (1000, 10, 5000)]
    inodes = set()
    for step, state in enumerate(states):
        extra = {"more": torch.ones(3)} if step == 0 else {}
        save_in_place(path, state | extra, step=step)
        found = checkpointing.load(path)
        assert torch.equal(found["model"]["w"], state["model"]["w"])
        assert ("more" in found) == (step == 0)
        inodes.add((path / "model.safetensors").stat().st_ino)
    assert len(inodes) == 1
