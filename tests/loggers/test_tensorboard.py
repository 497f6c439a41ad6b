import struct
import sys

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, RollBack
from modelzoo_trainer.loggers import TensorBoardLogger


def events(folder):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = loading.EventAccumulator(str(folder), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def scalars(folder, name):
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


@pytest.fixture(autouse=True)
def _tensorboard(monkeypatch):
    writing = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # Files of one second are read in the order of their numbers as texts: 10 comes before 9.
    monkeypatch.setattr(writing, "_global_uid", writing.AtomicCounter(0))


class Extra(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        weight = model.head.weight.detach().clone()
        trainer.log_metrics(text="some words", weight=weight, one=torch.ones(1))


def test_numbers_texts_and_tensors_are_written(make, batches):
    trainer = make(TensorBoardLogger(), callbacks=[Extra()])
    trainer.fit(batches, batches[:1])
    found = events(trainer.model_dir / "events")
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.step for event in found.Scalars("one")] == [1, 2, 3, 4]
    assert [event.step for event in found.Scalars("validate_0/loss")] == [4]
    assert found.Tags()["histograms"] == ["weight"]
    assert found.Tags()["tensors"] == ["text/text_summary"]


def test_the_folder_can_be_chosen(make, batches, tmp_path):
    make(TensorBoardLogger(summary_dir=tmp_path / "here")).fit(batches)
    assert len(scalars(tmp_path / "here", "loss")) == 4


def test_the_legacy_folders_have_no_prefix(make, batches):
    trainer = make(TensorBoardLogger(legacy_event_dirs=True))
    trainer.fit(batches, batches[:1])
    assert [step for step, _ in scalars(trainer.model_dir / "train", "loss")] == [1, 2, 3, 4]
    assert [step for step, _ in scalars(trainer.model_dir / "eval", "loss")] == [4]


def test_a_run_that_resumes_hides_the_steps_that_it_takes_again(make, batches):
    first = make(TensorBoardLogger(), checkpoint=Checkpoint(steps=2))
    first.fit(batches)
    first.close()
    second = make(TensorBoardLogger(), max_steps=3)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    found = scalars(second.model_dir / "events", "loss")
    assert [step for step, _ in found] == [1, 2, 3]


def test_a_run_resumes_although_an_event_is_damaged(make, batches):
    first = make(TensorBoardLogger(), checkpoint=Checkpoint(steps=2))
    first.fit(batches)
    first.close()
    (file,) = (first.model_dir / "events").glob("*.tfevents.*")
    with file.open("ab") as opened:
        opened.write(struct.pack("<QI", 8, 0) + b"\xff" * 8 + bytes(4))
    second = make(TensorBoardLogger(), max_steps=3)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    assert [step for step, _ in scalars(second.model_dir / "events", "loss")] == [1, 2, 3]


def test_a_fit_after_a_load_hides_the_steps_that_it_takes_again(make, batches):
    first = make(TensorBoardLogger(), checkpoint=Checkpoint(steps=2))
    first.fit(batches)
    first.close()
    second = make(TensorBoardLogger(), max_steps=3)
    second.load_checkpoint(first.model_dir / "checkpoint_2")
    second.validate(batches[:1])
    second.fit(batches)
    second.close()
    found = scalars(second.model_dir / "events", "loss")
    assert [step for step, _ in found] == [1, 2, 3]


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_run_that_begins_anew_moves_the_events_of_others(make, batches, caplog, is_legacy):
    first = make(TensorBoardLogger(legacy_event_dirs=is_legacy), max_steps=4)
    first.fit(batches, batches[:1])
    first.close()
    second = make(TensorBoardLogger(legacy_event_dirs=is_legacy), max_steps=2)
    second.validate(batches[:1])
    second.fit(batches)
    second.close()
    folder = second.model_dir / ("train" if is_legacy else "events")
    assert [step for step, _ in scalars(folder, "loss")] == [1, 2]
    (aside,) = folder.glob("earlier-*")
    assert [step for step, _ in scalars(aside, "loss")] == [1, 2, 3, 4]
    is_val = "eval" if is_legacy else "events"
    name = "loss" if is_legacy else "validate_0/loss"
    assert [step for step, _ in scalars(second.model_dir / is_val, name)] == [0]
    assert f"to {aside}" in caplog.text


class GoBack(Callback):
    """Goes back to the last checkpoint, once."""

    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            self.step = None
            found = RuntimeError("nowhere to go back to")
            raise RollBack("bad", step=trainer.global_step, batches=[], cause=found)


def test_a_run_that_goes_back_hides_the_steps_that_it_takes_again(make, batches):
    trainer = make(
        TensorBoardLogger(), callbacks=[GoBack(5)], checkpoint=Checkpoint(steps=2), max_steps=6
    )
    trainer.fit(batches)
    trainer.close()
    found = scalars(trainer.model_dir / "events", "loss")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]


def test_a_validation_of_an_older_checkpoint_hides_nothing(make, batches):
    trainer = make(TensorBoardLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    trainer.fit(batches)
    trainer.validate_all(batches[:1], ckpt_paths=trainer.model_dir / "checkpoint_2")
    trainer.close()
    found = scalars(trainer.model_dir / "events", "loss")
    assert [step for step, _ in found] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_is_told_once(make, batches, tmp_path, caplog):
    (tmp_path / "file").touch()
    trainer = make(TensorBoardLogger(summary_dir=tmp_path / "file"))
    trainer.fit(batches)
    assert trainer.global_step == 4
    assert caplog.text.count("metrics are lost") == 1


def test_a_missing_library_is_told_with_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelzoo-trainer\[tensorboard\]'"):
        make(TensorBoardLogger())


def test_two_places_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="either summary_dir or legacy_event_dirs"):
        TensorBoardLogger(summary_dir=tmp_path, legacy_event_dirs=True)


def test_the_numbers_of_a_step_are_one_event(make, batches):
    trainer = make(TensorBoardLogger())
    trainer.fit(batches, batches[:1])
    trainer.close()
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (path,) = (trainer.model_dir / "events").iterdir()
    steps = [
        event.step for event in loading.EventFileLoader(str(path)).Load() if event.summary.value
    ]
    names = [
        {value.tag for value in event.summary.value}
        for event in loading.EventFileLoader(str(path)).Load()
        if event.summary.value
    ]
    assert steps == [1, 2, 3, 4, 4]
    assert "loss" in names[0]
    assert names[-1] == {"validate_0/loss"}
