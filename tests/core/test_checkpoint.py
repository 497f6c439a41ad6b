"""When checkpoints are written, which one is loaded, and what happens when the disk refuses."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    checkpointing,
)
from modelzoo_trainer.callbacks import ExtraCheckpoint
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.folder import hidden_name
from tests.doubles import Recorder, TinyModel, differing, tiny_batches, weights_of


def steps_in(folder: Path) -> list[int]:
    return [info.step for info in checkpointing.list_checkpoints(folder)]


def flip(file: Path, position: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def damage(checkpoint: Path) -> None:
    flip(next(checkpoint.glob("*.safetensors")))


# ---- when


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"steps": 3}, [3, 6, 9, 10]),
        ({"epochs": 1}, [5, 10]),
        ({"epochs": 2}, [10]),
        ({"minutes": 1000}, [10]),
        ({"minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"steps": 4, "epochs": 1}, [4, 5, 8, 10]),
        ({"steps": 0}, []),
        ({}, []),
        ({"save_final_checkpoint": True}, [10]),
        ({"steps": 0, "save_final_checkpoint": True}, [10]),
        ({"steps": 5, "save_final_checkpoint": True}, [5, 10]),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow_cases(every=4)
def test_checkpoints_are_written_when_they_are_due(
    trainer_of, settings, steps, asynchronous
) -> None:
    trainer = trainer_of(checkpoint=Checkpoint(asynchronous=asynchronous, **settings), num_epochs=2)
    trainer.fit(tiny_batches(5))
    assert steps_in(trainer.model_dir) == steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "^checkpoint.steps: expected an integer >= 0 or null, got -1"),
        ({"steps": True}, "^checkpoint.steps: expected an integer >= 0 or null, got true"),
        ({"steps": 1.5}, "^checkpoint.steps: expected an integer >= 0 or null, got 1.5"),
        ({"epochs": 0}, "^checkpoint.epochs: expected an integer > 0 or null, got 0"),
        ({"minutes": 0}, "^checkpoint.minutes: expected a finite number > 0 or null, got 0"),
        ({"minutes": "5"}, "^checkpoint.minutes: expected a finite number > 0 or null, got '5'"),
        (
            {"save_final_checkpoint": "no"},
            "save_final_checkpoint: .* true or false, got 'no'",
        ),
        ({"save_final_checkpoint": 1}, "^checkpoint.save_final_checkpoint: .*, got 1"),
        ({"save_final_checkpoint": None}, "^checkpoint.save_final_checkpoint: .*, got null"),
        ({"checkpoint_name": "x"}, r"^checkpoint.checkpoint_name is 'x'; .* the field {step} once"),
        ({"checkpoint_name": None}, r"^checkpoint.checkpoint_name is None"),
        ({"checkpoint_name": ".{step}"}, r"'\.{step}'; .* start with a dot"),
        ({"checkpoint_name": "..{step}"}, r"start with a dot"),
        ({"checkpoint_name": ".tmp-{step}-deadbeef"}, r"start with a dot"),
        ({"checkpoint_name": "../{step}"}, r"start with a dot"),
        ({"checkpoint_name": "a/{step}"}, r"'a/{step}'; path separators"),
        ({"checkpoint_name": "a\\{step}"}, r"path separators"),
        ({"checkpoint_name": "a\0{step}"}, r"'a\\x00{step}'; .* unprintable"),
        ({"checkpoint_name": "a\n{step}"}, r"unprintable"),
        ({"checkpoint_name": "\udc80{step}"}, r"unprintable"),
        ({"checkpoint_name": "{{{step}}}"}, r"no braces other than in {step}"),
        ({"checkpoint_name": "x" * 250 + "{step}"}, r"too long for a file name .*limit: \d+\)"),
        ({"checkpoint_name": "\u00e9" * 110 + "{step}"}, r"limit: \d+\)"),
        ({"checkpoint_root": "a\0b"}, r"^checkpoint_root must .*null bytes.* 'a\\x00b'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(**settings)


class Wide(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(100_000))


def test_the_first_look_at_the_free_space_counts_the_state_of_the_optimizer(
    trainer_of, monkeypatch
) -> None:
    free = [1_000_000]  # bytes; the model takes 400,000, and AdamW's state twice as many
    monkeypatch.setattr(checkpointing, "free_bytes", lambda folder: free[0])
    settings = {"model": Wide, "optimizer": lambda model: torch.optim.AdamW(model.parameters())}
    with pytest.raises(ConfigError, match="of free space, and one checkpoint takes at least"):
        trainer_of(checkpoint=Checkpoint(steps=1), **settings).fit(tiny_batches(1))
    free[0] = 1_500_000
    trainer_of(checkpoint=Checkpoint(steps=1), **settings).fit(tiny_batches(1))


@pytest.mark.parametrize("longest", ["x" * 204, "\u00e9" * 102])
def test_the_longest_name_that_is_taken_can_be_written_deleted_and_found(
    trainer_of, tmp_path, longest
) -> None:
    with pytest.raises(ConfigError, match=r"limit: 1\)"):
        Checkpoint(checkpoint_name=longest + "x{step}")
    name = longest + "{step}"
    trainer_of(checkpoint=Checkpoint(steps=1, checkpoint_name=name), max_steps=2).fit(
        tiny_batches(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 4_294_967_295)
        hidden = hidden_name("trash", f"{name.format(step=2**63 - 1)}_9999")
    assert len(hidden.encode()) == 255
    again = trainer_of(checkpoint=Checkpoint(steps=1, checkpoint_name=name), max_steps=3)
    again.fit(tiny_batches(3))
    assert steps_in(again.model_dir) == [1, 2, 3]
    checkpointing.delete(again.model_dir / name.format(step=1))
    assert steps_in(again.model_dir) == [2, 3]


def test_the_newest_checkpoint_is_pointed_to(trainer_of) -> None:
    trainer = trainer_of(checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(5))
    assert (trainer.model_dir / "latest").readlink() == Path("checkpoint_5")


@pytest.mark.parametrize("stale", ["checkpoint_2", "checkpoint_9", "../elsewhere", None])
@pytest.mark.slow_cases(every=4)
def test_a_link_to_the_newest_checkpoint_that_leads_elsewhere_is_corrected_at_the_next_start(
    trainer_of, stale
) -> None:
    latest = trained(trainer_of, 4)
    latest.unlink()
    if stale is not None:
        latest.symlink_to(stale)
    assert started_at(trainer_of, latest) == Path("checkpoint_4")


def test_a_damaged_checkpoint_is_not_pointed_to_at_the_next_start(trainer_of) -> None:
    latest = trained(trainer_of, 4)
    damage(latest.parent / "checkpoint_4")
    assert started_at(trainer_of, latest) == Path("checkpoint_2")


def test_a_link_to_no_checkpoint_at_all_is_removed_at_the_next_start(trainer_of, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to("checkpoint_4")
    assert started_at(trainer_of, tmp_path / "run" / "latest") is None


def trained(trainer_of: Any, num_steps: int) -> Path:
    """Return the link in the folder of a run with a checkpoint at every second step."""
    trainer = trainer_of(checkpoint=Checkpoint(steps=2), max_steps=num_steps)
    trainer.fit(tiny_batches(num_steps))
    trainer.close()
    return trainer.model_dir / "latest"


def started_at(trainer_of: Any, latest: Path) -> Path | None:
    """Return where the link leads when a run in its folder takes its first step."""
    found = []

    class Look(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            found.append(latest.readlink() if latest.is_symlink() else None)

    trainer_of(Look(), checkpoint=Checkpoint(steps=2), max_steps=6).fit(tiny_batches(6))
    return found[0]


# ---- while training goes on


class Slow:
    """Makes the disk wait until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.failure: OSError | None = None
        sync = disk.sync

        def slow_sync(descriptor: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(60)
                if self.failure is not None:
                    raise self.failure
            sync(descriptor)

        monkeypatch.setattr(disk, "sync", slow_sync)


@pytest.fixture
def slow(monkeypatch):
    made = Slow(monkeypatch)
    yield made
    made.go.set()


class Releasing(Callback):
    """Lets the disk go on at a step, and notes what had been committed before."""

    def __init__(self, slow: Slow, step: int) -> None:
        self.slow = slow
        self.step = step
        self.committed: list[int] = []
        self.before: list[int] | None = None

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self.committed.append(trainer.global_step)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.before = list(self.committed)
            self.slow.go.set()


def test_training_goes_on_while_a_checkpoint_is_written(trainer_of, slow) -> None:
    releasing = Releasing(slow, 4)
    trainer = trainer_of(releasing, checkpoint=Checkpoint(steps=2, asynchronous=True))
    trainer.fit(tiny_batches(5))
    assert releasing.before == []
    assert min(releasing.committed) >= 4
    assert steps_in(trainer.model_dir) == [2, 4, 5]


def test_an_asynchronous_checkpoint_holds_the_state_of_its_step(trainer_of, slow) -> None:
    seen = {}

    class Seeing(Callback):
        def on_step_boundary(self, trainer):
            seen[trainer.global_step] = weights_of(trainer)

    trainer = trainer_of(
        Seeing(), Releasing(slow, 4), checkpoint=Checkpoint(steps=2, asynchronous=True)
    )
    trainer.fit(tiny_batches(5))
    for step in (2, 4, 5):
        state = checkpointing.load(trainer.model_dir / f"checkpoint_{step}")
        assert differing(state["model"], seen[step]) == []


def test_a_failure_of_an_asynchronous_save_is_told_and_training_goes_on(
    trainer_of, slow, caplog
) -> None:
    class Mending(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                slow.failure = OSError(errno.ENOSPC, "No space left on device")
                slow.go.set()
            if trainer.global_step == 5:
                slow.failure = None

    trainer = trainer_of(Mending(), checkpoint=Checkpoint(steps=2, asynchronous=True))
    trainer.fit(tiny_batches(7))
    assert trainer.global_step == 7
    assert steps_in(trainer.model_dir)[-1] == 7
    assert 2 not in steps_in(trainer.model_dir)
    assert "NO CHECKPOINT WAS SAVED" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_checkpoint_that_is_asked_for_is_there_on_return(trainer_of) -> None:
    there = []

    class Asking(Callback):
        def on_step_boundary(self, trainer):
            there.append(checkpointing.verify(trainer.save_checkpoint()))

    trainer = trainer_of(Asking(), checkpoint=Checkpoint(asynchronous=True))
    trainer.fit(tiny_batches(2))
    assert there == [[], []]


def test_a_write_that_is_under_way_when_a_run_fails_is_finished(trainer_of, slow) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                slow.go.set()
                raise ZeroDivisionError

    trainer = trainer_of(Failing(), checkpoint=Checkpoint(steps=2, asynchronous=True))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(tiny_batches(5))
    assert steps_in(trainer.model_dir) == [2]


# ---- when the disk refuses


class Refusing(Callback):
    """Makes the disk refuse from one step to another."""

    def __init__(self, monkeypatch: Any, first: int, last: int, code: int = errno.ENOSPC) -> None:
        self.steps = range(first, last + 1)
        self.is_on = False
        write = disk.write

        def refuse(descriptor: int, view: Any) -> int:
            if self.is_on:
                raise OSError(code, "the disk refuses")
            return write(descriptor, view)

        monkeypatch.setattr(disk, "write", refuse)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.is_on = trainer.global_step in self.steps


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_refuses_for_a_while_does_not_end_the_training(
    trainer_of, monkeypatch, caplog, code
) -> None:
    trainer = trainer_of(Refusing(monkeypatch, 3, 6, code), checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(9))
    assert trainer.global_step == 9
    assert steps_in(trainer.model_dir) == [2, 8, 9]
    assert caplog.text.count("NO CHECKPOINT WAS SAVED") == 2
    assert not list(trainer.model_dir.glob(".tmp-*"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("refused", [range(0), range(3, 6)], ids=["written", "refused"])
@pytest.mark.slow_cases(every=4)
def test_saving_has_an_end_however_a_checkpoint_is_written(
    trainer_of, monkeypatch, asynchronous, refused
) -> None:
    class Watch(Refusing):
        def __init__(self) -> None:
            super().__init__(monkeypatch, refused.start, refused.stop - 1)
            self.events: list[str] = []

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.events.append(f"step {trainer.global_step + 1}")

        def on_save_checkpoint(self, trainer, state_dict):
            self.events.append("save")

        def saving_end(self):
            self.events.append("end")

    watch = Watch()
    checkpoint = Checkpoint(steps=2, asynchronous=asynchronous)
    beside = ExtraCheckpoint(steps=3, checkpoint_name="extra_{step}")
    trainer_of(watch, beside, checkpoint=checkpoint).fit(tiny_batches(6))
    save = ["save", "end"]
    assert watch.events == [
        *["step 1", "step 2", *save, "step 3", *save, "step 4", *save, "step 5"],
        *["step 6", *save, *save],
    ]


def test_the_last_checkpoint_of_a_run_must_succeed(trainer_of, monkeypatch) -> None:
    trainer = trainer_of(Refusing(monkeypatch, 3, 9), checkpoint=Checkpoint(steps=2))
    with pytest.raises(CheckpointError, match=r"the disk refuses"):
        trainer.fit(tiny_batches(5))
    assert trainer.global_step == 5
    assert steps_in(trainer.model_dir) == [2]


def test_a_state_that_cannot_be_saved_is_a_mistake_and_ends_the_run(trainer_of) -> None:
    class Odd(Callback):
        thing: object = 1

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.thing = object()

        def state_dict(self):
            return {"thing": self.thing}

        def load_state_dict(self, state):
            pass

    with pytest.raises(CheckpointError, match=r"callbacks.*thing is a object"):
        trainer_of(Odd(), checkpoint=Checkpoint(steps=1)).fit(tiny_batches(3))


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    trainer_of, monkeypatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    recorder = Recorder()
    trainer = trainer_of(recorder, checkpoint=Checkpoint(steps=1))
    monkeypatch.setattr(disk, "make_folder", refuse)
    with pytest.raises(ConfigError, match=r"checkpoints cannot be written: .*Read-only"):
        trainer.fit(tiny_batches(3))
    assert recorder.count("on_train_start") == 0


def test_a_disk_without_space_for_one_checkpoint_is_refused_with_the_numbers(
    trainer_of, monkeypatch
) -> None:
    monkeypatch.setattr(checkpointing, "free_bytes", lambda folder: 100)
    trainer = trainer_of(checkpoint=Checkpoint(steps=1))
    with pytest.raises(ConfigError, match=r"100 B of free space, and one checkpoint takes"):
        trainer.fit(tiny_batches(3))


def test_what_a_crash_left_over_is_removed_at_the_start(trainer_of, tmp_path) -> None:
    left = tmp_path / "run" / ".tmp-checkpoint_7-999999999-abcdef01"
    left.mkdir(parents=True)
    (left / "state.json").write_text("{")
    trainer_of(checkpoint=Checkpoint(steps=1)).fit(tiny_batches(1))
    assert not left.exists()


# ---- which one is loaded


def run(trainer_of, *callbacks: Any, num: int = 6, **settings: Any) -> Any:
    trainer = trainer_of(*callbacks, checkpoint=Checkpoint(steps=2, **settings), max_steps=num)
    trainer.fit(tiny_batches(10))
    return trainer


def test_the_newest_intact_checkpoint_is_used_instead_of_a_damaged_one(trainer_of, caplog) -> None:
    first = run(trainer_of)
    damage(first.model_dir / "checkpoint_6")
    damage(first.model_dir / "checkpoint_4")
    first.close()
    loaded = []

    class Loaded(Callback):
        def on_before_load_checkpoint(self, trainer, ckpt_path):
            loaded.append(ckpt_path and ckpt_path.name)

    second = run(trainer_of, Loaded(), num=8)
    assert loaded[0] == "checkpoint_2"
    assert second.global_step == 8
    skipped = [line for line in caplog.messages if line.startswith("Skipped")]
    assert [line.split(":")[0].rsplit("/")[-1] for line in skipped] == [
        "checkpoint_6",
        "checkpoint_4",
    ]
    assert all("is damaged" in line for line in skipped)


def test_a_run_goes_on_as_if_a_damaged_checkpoint_had_never_been(trainer_of, tmp_path) -> None:
    expected = weights_of(run(trainer_of))
    damage(tmp_path / "run" / "checkpoint_6")
    assert differing(weights_of(run(trainer_of)), expected) == []
    assert (tmp_path / "run" / "checkpoint_6_2").is_dir()


def test_an_uncommitted_directory_is_passed_over(trainer_of, tmp_path, caplog) -> None:
    run(trainer_of)
    (tmp_path / "run" / "checkpoint_6" / "manifest.json").unlink()
    assert run(trainer_of, num=8).global_step == 8
    assert "has no manifest.json" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(trainer_of, tmp_path) -> None:
    run(trainer_of, num=4)
    for name in ("checkpoint_2", "checkpoint_4"):
        damage(tmp_path / "run" / name)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)No checkpoint in '.*run' is intact:\n  checkpoint_4: .*\n  checkpoint_2: .*"
        r"Move them away",
    ):
        run(trainer_of)


def test_a_damaged_checkpoint_that_is_named_is_an_error(trainer_of, tmp_path) -> None:
    trainer = run(trainer_of)
    damage(tmp_path / "run" / "checkpoint_4")
    before = weights_of(trainer)
    with pytest.raises(CheckpointError, match=r"checkpoint_4.*is damaged"):
        trainer.load_checkpoint(tmp_path / "run" / "checkpoint_4")
    assert differing(weights_of(trainer), before) == []


def test_a_checkpoint_that_was_copied_into_the_folder_is_found(trainer_of, tmp_path) -> None:
    import shutil

    run(trainer_of)
    shutil.copytree(tmp_path / "run" / "checkpoint_4", tmp_path / "other" / "checkpoint_4")
    trainer = trainer_of(model_dir=tmp_path / "other", checkpoint=Checkpoint(steps=2), max_steps=6)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.fit(tiny_batches(10))
    assert recorder.count("on_train_batch_end") == 2


def test_a_checkpoint_that_was_renamed_is_not_taken_for_a_newer_one(
    trainer_of, tmp_path, caplog
) -> None:
    run(trainer_of)
    (tmp_path / "run" / "checkpoint_2").rename(tmp_path / "run" / "checkpoint_90")
    assert run(trainer_of, num=8).global_step == 8
    assert "checkpoint_2" in caplog.text


def test_a_run_that_is_told_where_to_begin_warns_of_its_own_checkpoints(
    trainer_of, tmp_path, caplog
) -> None:
    run(trainer_of, num=4)
    (tmp_path / "given").mkdir()
    given = trainer_of(model_dir=tmp_path / "given", max_steps=1, checkpoint=Checkpoint(steps=1))
    given.fit(tiny_batches(10))
    trainer = trainer_of(checkpoint=Checkpoint(steps=2), max_steps=6)
    trainer.fit(tiny_batches(10), ckpt_path=tmp_path / "given" / "checkpoint_1")
    assert "although the folder already contains" in caplog.text


@pytest.mark.parametrize("ckpt_path", [None, "given", ...])
@pytest.mark.slow_cases(every=4)
def test_a_restart_goes_on_from_what_the_run_wrote_whatever_it_was_told_at_first(
    trainer_of, tmp_path, ckpt_path
) -> None:
    given = trainer_of(model_dir=tmp_path / "given", max_steps=1, checkpoint=Checkpoint(steps=1))
    given.fit(tiny_batches(10))
    told = tmp_path / "given" / "checkpoint_1" if ckpt_path == "given" else ckpt_path
    run(trainer_of, num=4)
    trainer = trainer_of(
        checkpoint=Checkpoint(steps=2, autoload_last_checkpoint=False), max_steps=6
    )
    trainer.autorestart.supervise(
        is_restart=True,
        last_checkpoint=tmp_path / "run" / "checkpoint_4",
        on_commit=lambda path: None,
    )
    steps = []

    class Noting(Callback):
        def on_step_boundary(self, trainer):
            steps.append(trainer.global_step)

    trainer.add_callback(Noting())
    trainer.fit(tiny_batches(10), ckpt_path=told)
    assert steps == [5, 6]


def test_a_run_that_ended_before_its_first_checkpoint_restarts_from_its_ckpt_path(
    trainer_of, tmp_path
) -> None:
    given = trainer_of(model_dir=tmp_path / "given", max_steps=1, checkpoint=Checkpoint(steps=1))
    given.fit(tiny_batches(10))
    trainer = trainer_of(max_steps=2)
    trainer.autorestart.resume_run()
    steps = []

    class Noting(Callback):
        def on_step_boundary(self, trainer):
            steps.append(trainer.global_step)

    trainer.add_callback(Noting())
    trainer.fit(tiny_batches(10), ckpt_path=tmp_path / "given" / "checkpoint_1")
    assert steps == [2]
    assert trainer.checkpoint.is_own is False


def test_a_link_to_a_checkpoint_is_not_passed_over_in_silence(trainer_of, tmp_path) -> None:
    run(trainer_of, num=4)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "checkpoint_4").symlink_to(tmp_path / "run" / "checkpoint_4")
    trainer = trainer_of(model_dir=tmp_path / "linked", checkpoint=Checkpoint(steps=2))
    with pytest.raises(CheckpointError, match=r"No checkpoint in '.*linked' is intact:\n.*link"):
        trainer.fit(tiny_batches(10))


# ---- what


def test_the_state_of_another_optimizer_is_refused(trainer_of, tmp_path) -> None:
    run(trainer_of)
    trainer = trainer_of(optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointMismatch, match=r"SGD as optimizer, but this run has AdamW"):
        trainer.load_checkpoint(tmp_path / "run" / "checkpoint_4")


def test_weights_of_another_program_are_loaded_from_safetensors(trainer_of, tmp_path) -> None:
    other = TinyModel()
    save_file(dict(other.state_dict()), tmp_path / "model.safetensors")
    trainer = trainer_of()
    trainer.load_checkpoint(tmp_path / "model.safetensors")
    assert differing(weights_of(trainer), dict(other.state_dict())) == []
    assert trainer.global_step == 0


def test_a_model_that_does_not_fit_is_shown_as_a_table(trainer_of, tmp_path) -> None:
    class Larger(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

    run(trainer_of)
    trainer = trainer_of(model=Larger)
    with pytest.raises(
        CheckpointMismatch, match=r"(?s)does not fit the model of this run:\n  missing +more"
    ) as caught:
        trainer.load_checkpoint(tmp_path / "run" / "checkpoint_4")
    assert any("checkpoint_4" in note for note in caught.value.__notes__)


def test_a_run_does_not_go_on_in_another_type(trainer_of, tmp_path) -> None:
    run(trainer_of)
    trainer = trainer_of(model=lambda: TinyModel().double())
    with pytest.raises(CheckpointMismatch, match=r"other type .*float32, the model has .*float64"):
        trainer.load_checkpoint(tmp_path / "run" / "checkpoint_4")


def test_a_checkpoint_has_no_pickle_in_it(trainer_of, tmp_path) -> None:
    run(trainer_of)
    files = list((tmp_path / "run" / "checkpoint_4").iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())


def test_another_number_of_callbacks_of_a_class_is_told(trainer_of, tmp_path, caplog) -> None:
    class Counts(Callback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    run(trainer_of, Counts(), Counts(), num=4)
    run(trainer_of, Counts(), Counts(), Counts())
    assert "number of Counts callbacks was 2 at the checkpoint and is now 3" in caplog.text


def test_one_object_serves_two_trainers_one_after_the_other(trainer_of, tmp_path) -> None:
    own = Checkpoint(steps=1)
    for max_steps, begin in ((2, 0), (4, 2)):
        recorder = Recorder()
        trainer = trainer_of(
            checkpoint=own, max_steps=max_steps, model_dir=tmp_path, callbacks=[recorder]
        )
        trainer.fit(tiny_batches(10))
        trainer.close()
        assert recorder.names.count("on_train_batch_start") == max_steps - begin


def test_a_checkpoint_is_said_to_be_loaded_when_it_is(trainer_of, caplog) -> None:
    caplog.set_level("INFO", "modelzoo_trainer")
    trainer = trainer_of(checkpoint=Checkpoint(steps=2), max_steps=2)
    trainer.fit(tiny_batches(2))
    path = trainer.model_dir / "checkpoint_2"
    trainer.load_checkpoint(path)
    assert f"Loaded checkpoint {path}." in caplog.text
    caplog.clear()
    trainer.model.head = torch.nn.Linear(4, 7)
    with pytest.raises(CheckpointError):
        trainer.load_checkpoint(path)
    assert "Loaded checkpoint" not in caplog.text
