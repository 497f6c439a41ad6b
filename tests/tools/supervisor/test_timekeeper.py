"""What a trainer's seconds are called, measured in this process."""

from __future__ import annotations

import time

import pytest

from modelzoo_trainer import Callback, Checkpoint, register_global_callback
from modelzoo_trainer.tools.supervisor import protocol
from modelzoo_trainer.tools.supervisor.goodput import Attempt, Goodput
from modelzoo_trainer.tools.supervisor.outcome import Ending, Outcome
from modelzoo_trainer.tools.supervisor.protocol import SharedStatus, TimeKind, known
from modelzoo_trainer.tools.supervisor.timekeeper import Timekeeper
from tests.doubles import make_trainer, tiny_batches

DONE = Ending(outcome=Outcome.DONE, cause="finished", exit_code=0)
CRASHED = Ending(outcome=Outcome.CRASHED, cause="", exit_code=1)


class Measured:
    """A shared status that a timekeeper writes into."""

    def __init__(self) -> None:
        self.shared = SharedStatus.create()
        self.committed = []
        self.timekeeper = Timekeeper(self.shared)
        self.handle = register_global_callback(self.timekeeper)

    def supervise(self, trainer) -> None:
        trainer.autorestart.supervise(is_restart=False, last_checkpoint=None, on_commit=self.commit)

    def commit(self, path) -> None:
        self.committed.append(path)
        self.timekeeper.note_commit(path)

    def end(self) -> None:
        self.handle.remove()
        self.shared.close()

    @property
    def kind(self) -> TimeKind:
        return TimeKind(int(self.shared.kind))


@pytest.fixture
def measured():
    made = Measured()
    yield made
    made.end()


class Kinds(Callback):
    """Notes what the time of each hook is called."""

    def __init__(self, measured) -> None:
        self.measured = measured
        self.seen = {}

    def note(self, hook):
        self.seen.setdefault(hook, []).append(self.measured.kind.name)

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.note("fit")

    def on_before_forward(self, trainer, model, batch, args, kwargs):
        self.note("forward")

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self.note("save")

    def on_validate_end(self, trainer, model, loop):
        self.note("validation")

    def on_fit_end(self, trainer, loop):
        self.note("end")


class Data:
    """Batches, and a note of what the time is called in which they are made."""

    def __init__(self, kinds, num) -> None:
        self.kinds = kinds
        self.batches = tiny_batches(num)

    def __iter__(self):
        for batch in self.batches:
            self.kinds.note("data")
            yield batch


def test_every_stretch_of_a_run_has_its_name(tmp_path, measured):
    kinds = Kinds(measured)
    trainer = make_trainer(
        tmp_path, kinds, max_steps=4, eval_frequency=2, checkpoint=Checkpoint(steps=4)
    )
    with trainer:
        trainer.fit(Data(kinds, 4), tiny_batches(1))
    assert kinds.seen == {
        "fit": ["STARTUP"],
        "data": ["DATA"] * 4,
        "forward": ["FIRST_STEP", "STEPS", "VALIDATION", "STEPS", "STEPS", "VALIDATION"],
        "save": ["SAVING"],
        "validation": ["VALIDATION"] * 2,
        "end": ["OTHER"],
    }


def test_a_validation_alone_is_one_and_not_start_up(tmp_path, measured):
    with make_trainer(tmp_path) as trainer:
        trainer.validate(tiny_batches(2))
    assert measured.kind is TimeKind.OTHER
    assert measured.shared.seconds[TimeKind.VALIDATION] > 0
    assert measured.shared.seconds[TimeKind.STEPS] == 0


def test_the_shared_status_knows_steps_and_checkpoints(tmp_path, measured):
    for max_steps in (3, 7):
        settings = {"max_steps": max_steps, "checkpoint": Checkpoint(steps=3), "num_steps": None}
        with make_trainer(tmp_path, eval_frequency=None, **settings) as trainer:
            measured.supervise(trainer)
            trainer.fit(tiny_batches(8))
    numbers = [known(one) for one in (measured.shared.start_step, measured.shared.step)]
    assert numbers == [3, 7]
    assert known(measured.shared.saved_step) == 7
    names = [path.name for path in measured.committed]
    assert names == ["checkpoint_3", "checkpoint_6", "checkpoint_7"]


def test_a_checkpoint_that_is_written_meanwhile_is_that_of_its_own_step(tmp_path, measured):
    names = []

    class Watch(Callback):
        def on_after_save_checkpoint(self, trainer, ckpt_path):
            names.append(ckpt_path.name)

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            seen = known(measured.shared.saved_step)
            assert seen == (int(names[-1].removeprefix("checkpoint_")) if names else None)
            time.sleep(0.05)  # to write it in

    settings = {"max_steps": 4, "eval_frequency": None}
    checkpoint = Checkpoint(steps=2, asynchronous=True)
    with make_trainer(tmp_path, Watch(), checkpoint=checkpoint, **settings) as trainer:
        measured.supervise(trainer)
        trainer.fit(tiny_batches(4))
    assert names == ["checkpoint_2", "checkpoint_4"]
    assert known(measured.shared.saved_step) == 4
    assert measured.shared.spent_at_save <= measured.shared.seconds[TimeKind.STEPS]


def test_a_commit_is_known_before_anybody_else_hears_of_it(tmp_path, measured):
    class Fail(Callback):
        def on_after_save_checkpoint(self, trainer, ckpt_path):
            raise OSError("the upload failed")

    with make_trainer(tmp_path, Fail(), max_steps=4, checkpoint=Checkpoint(steps=2)) as trainer:
        measured.supervise(trainer)
        with pytest.raises(OSError, match="upload"):
            trainer.fit(tiny_batches(4))
    assert [path.name for path in measured.committed] == ["checkpoint_2"]
    assert known(measured.shared.saved_step) == 2


class Clock:
    """Goes on by a second whenever somebody looks at it, and when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("ending", [DONE, CRASHED])
def test_the_seconds_of_a_run_add_up_to_its_life(tmp_path, monkeypatch, ending):
    clock = Clock()
    monkeypatch.setattr(protocol, "time", clock)
    measured = Measured()

    class Fail(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            if trainer.global_step == 0:
                clock.now += 100.0  # more than any other step takes

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if ending is CRASHED and trainer.global_step == 5:
                raise RuntimeError("broken")

    begin = measured.shared.since
    trainer = make_trainer(
        tmp_path,
        Fail(),
        max_steps=6,
        eval_frequency=3,
        checkpoint=Checkpoint(steps=2),
        grad_accum_steps=2,
    )
    measured.supervise(trainer)
    with trainer:
        try:
            trainer.fit(tiny_batches(12), tiny_batches(2))
        except RuntimeError:
            assert ending is CRASHED
    measured.shared.end()
    made = Attempt(number=1, down_s=0.0, shared=measured.shared, ending=ending)
    life = measured.shared.since - begin
    measured.end()
    goodput = Goodput([], "now")
    goodput.attempts.append(made)
    [account] = goodput.breakdowns()
    assert sum(account.values()) == pytest.approx(life)
    assert (account["lost"] > 0) is (ending is CRASHED)
    parts = ("steps", "data", "saving", "validation", "compiling", "startup")
    assert all(account[part] > 0 for part in parts)
    assert made.shared.median_s > 0
