import shutil

import pytest

from modelzoo_trainer import Callback, Checkpoint, CheckpointError, ConfigError, checkpointing
from modelzoo_trainer.callbacks import KeepNCheckpoints


def names(folder):
    return sorted(path.name for path in folder.glob("*checkpoint_*"))


def test_the_newest_ones_are_kept(make, batches):
    trainer = make(KeepNCheckpoints(2), checkpoint=Checkpoint(steps=1))
    trainer.fit(batches)
    assert names(trainer.model_dir) == ["checkpoint_3", "checkpoint_4"]


def test_without_a_number_all_are_kept(make, batches):
    trainer = make(KeepNCheckpoints(), checkpoint=Checkpoint(steps=1))
    trainer.fit(batches)
    assert len(names(trainer.model_dir)) == 4


class Seen(Callback):
    def __init__(self):
        self.at_save = []

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self.at_save.append(names(trainer.model_dir))


def test_the_old_one_is_there_until_the_new_one_is(make, batches):
    seen = Seen()
    make(seen, KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1), max_steps=2).fit(batches)
    assert seen.at_save == [["checkpoint_1"], ["checkpoint_1", "checkpoint_2"]]


def test_what_another_run_has_written_stays(make, batches):
    trainer = make(checkpoint=Checkpoint(steps=1), max_steps=2)
    trainer.fit(batches)
    loop_of_four = make(
        KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1, autoload_last_checkpoint=False)
    )
    loop_of_four.fit(batches)
    assert names(trainer.model_dir) == ["checkpoint_1", "checkpoint_2", "checkpoint_4"]


def test_a_run_that_resumes_continues_with_the_list(make, batches):
    make(KeepNCheckpoints(2), checkpoint=Checkpoint(steps=1), max_steps=3).fit(batches)
    resumed = make(KeepNCheckpoints(2), checkpoint=Checkpoint(steps=1), max_steps=4)
    resumed.fit(batches)
    assert names(resumed.model_dir) == ["checkpoint_3", "checkpoint_4"]


def test_what_a_run_that_was_cut_off_has_left_goes_when_the_next_one_begins(make, batches):
    make(KeepNCheckpoints(3), checkpoint=Checkpoint(steps=1), max_steps=3).fit(batches)
    begun = []

    class Look(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            begun.append(names(trainer.model_dir))

    make(KeepNCheckpoints(2), Look(), checkpoint=Checkpoint(steps=1), max_steps=4).fit(batches)
    assert begun == [["checkpoint_2", "checkpoint_3"]]


def test_a_run_that_starts_from_anothers_checkpoint_leaves_that_alone(make, batches, tmp_path):
    first = make(KeepNCheckpoints(2), checkpoint=Checkpoint(steps=1), max_steps=3)
    first.fit(batches)
    other = make(
        KeepNCheckpoints(1),
        checkpoint=Checkpoint(steps=1),
        max_steps=6,
        model_dir=tmp_path / "other",
    )
    other.fit(batches, ckpt_path=first.model_dir / "checkpoint_3")
    assert names(first.model_dir) == ["checkpoint_2", "checkpoint_3"]
    assert names(other.model_dir) == ["checkpoint_6"]


def test_a_failure_to_delete_is_logged_and_the_run_continues(make, batches, caplog, monkeypatch):
    def refuse(path):
        raise CheckpointError(f"{path} stays")

    trainer = make(KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1))
    monkeypatch.setattr(checkpointing, "delete", refuse)
    trainer.fit(batches)
    assert trainer.global_step == 4
    assert caplog.text.count("Cannot delete checkpoint") == 3


def test_one_that_is_gone_already_is_no_failure(make, batches, caplog):
    class Remove(Callback):
        def on_train_end(self, trainer, model, loop, loop_idx):
            shutil.rmtree(trainer.model_dir / "checkpoint_2")

    trainer = make(Remove(), KeepNCheckpoints(1), checkpoint=Checkpoint(steps=2), max_steps=3)
    trainer.fit(batches)
    assert names(trainer.model_dir) == ["checkpoint_3"]
    assert "Cannot delete checkpoint" not in caplog.text


@pytest.mark.parametrize("n", [0, -1, True, 1.5])
def test_a_number_that_is_none_is_refused(n):
    with pytest.raises(ConfigError, match="expected an integer > 0 or null, got"):
        KeepNCheckpoints(n)


# ---- after a restart


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Raise at a step boundary, after the checkpoint of the step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Crash


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_crashes_again_and_again_leaves_no_more_than_its_number(
    make, batches, asynchronous
):
    def run(*callbacks):
        checkpoint = Checkpoint(steps=1, asynchronous=asynchronous)
        return make(KeepNCheckpoints(2), *callbacks, checkpoint=checkpoint, max_steps=9)

    for step in (2, 3, 5, 6):
        with pytest.raises(Crash):
            run(CrashAt(step)).fit(batches)
    trainer = run()
    trainer.fit(batches)
    assert names(trainer.model_dir) == ["checkpoint_8", "checkpoint_9"]


def test_the_one_that_a_run_resumes_from_stays_until_there_is_a_newer_one(make, batches):
    make(checkpoint=Checkpoint(steps=2), max_steps=2).fit(batches)
    seen = Seen()
    resumed = make(seen, KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1), max_steps=3)
    resumed.fit(batches)
    assert seen.at_save == [["checkpoint_2", "checkpoint_3"]]


def test_a_checkpoint_of_another_kind_that_a_run_begins_with_stays(make, batches):
    first = make(callbacks=[KeepNCheckpoints(1)], checkpoint=Checkpoint(steps=1), max_steps=2)
    first.fit(batches)
    special = first.model_dir / "special_1"
    checkpointing.save(special, checkpointing.load(first.model_dir / "checkpoint_2"), step=2)
    second = make(KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1), max_steps=4)
    second.fit(batches, ckpt_path=special)
    assert special.is_dir()


def test_a_folder_that_is_no_checkpoint_is_never_deleted(make, batches, caplog):
    class Replace(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            if trainer.global_step == 1:
                path = trainer.model_dir / "checkpoint_1"
                shutil.rmtree(path)
                path.mkdir()
                (path / "mine.txt").write_text("mine")

    trainer = make(Replace(), KeepNCheckpoints(1), checkpoint=Checkpoint(steps=1), max_steps=2)
    trainer.fit(batches)
    assert (trainer.model_dir / "checkpoint_1" / "mine.txt").read_text() == "mine"
    assert "/checkpoint_1: " in caplog.text
