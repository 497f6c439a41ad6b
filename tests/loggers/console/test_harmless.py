"""What fails in showing a run leaves out a line; the run takes all its steps."""

import io
import itertools
import logging
import sys
import threading

import pytest
import torch
from torch import nn

from modelzoo_trainer import TrainingLoop
from modelzoo_trainer.callbacks import ProgressBar
from modelzoo_trainer.loggers import ProgressLogger, default_loggers
from modelzoo_trainer.loggers.console import bar, blocks, display
from modelzoo_trainer.loggers.console.harmless import harmless, known
from modelzoo_trainer.optim.stepwise import LambdaLR
from tests.doubles import TinyModel, tiny_batches


def fail(*args, **kwargs):
    raise RuntimeError("the console is gone")


class Terminal(io.StringIO):
    """A terminal that breaks after some writes."""

    def __init__(self, num_good=10**9):
        super().__init__()
        self.num_good = num_good

    def isatty(self):
        return True

    def write(self, text):
        self.num_good -= 1
        if self.num_good < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.DEBUG, logger="modelzoo_trainer")
    return lambda: [r.getMessage() for r in caplog.records if r.name.endswith("progress")]


@pytest.fixture
def warnings(caplog):
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name.startswith("modelzoo_trainer")
    ]


def labels(start):
    return [line.split(":")[0].strip() for line in start.splitlines()[1:]]


ROWS = ["data", "length", "validation", "checkpoints", "start", "folder"]


class OfText(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * float(len(batch[0]))


def test_batches_of_unknown_size_have_no_size(trainer_of, messages):
    trainer_of(model=OfText).fit([["a"], ["abc"]])
    start, end = messages()[0], messages()[-1]
    assert "2 batches per epoch, 2 steps per epoch" in start
    assert labels(start) == ROWS
    assert end.startswith("Finished at step 2")
    assert "samples" not in start + end


class Odd:
    """A dataloader whose length cannot be asked for."""

    def __iter__(self):
        return iter(tiny_batches(3))

    def __len__(self):
        raise ValueError("it depends")


def test_a_validation_whose_length_raises_is_shown_without_it(trainer_of, messages):
    trainer = trainer_of()
    trainer.fit(tiny_batches(2), Odd())
    assert any(line.startswith("validate_0: loss") for line in messages())
    trainer.validate(Odd())
    assert trainer.global_step == 2


@pytest.mark.parametrize("row", ROWS[:-1])
def test_a_row_that_fails_is_left_out(trainer_of, messages, monkeypatch, row):
    names = dict(zip(ROWS, ("data", "length", "validation", "checkpoints", "origin"), strict=False))
    monkeypatch.setattr(blocks, f"_{names[row]}", fail)
    trainer_of().fit(tiny_batches(2))
    assert labels(messages()[0]) == [label for label in ROWS if label != row]
    assert messages()[-1].startswith("Finished at step 2")


def test_a_first_line_that_fails_keeps_the_rest(trainer_of, messages, monkeypatch):
    monkeypatch.setattr(blocks, "_head", fail)
    trainer_of().fit(tiny_batches(2))
    assert labels(messages()[0]) == ROWS


def test_a_model_with_lazy_parameters_has_a_start(trainer_of, messages):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(1)

        def forward(self, batch):
            return self.layer(torch.ones(2, 3)).mean()

    trainer_of(model=Lazy).fit(tiny_batches(2))
    assert labels(messages()[0]) == ROWS
    assert messages()[-1].startswith("Finished at step 2")


def test_a_schedule_whose_preview_raises_has_no_hint(trainer_of, messages):
    def of(step):
        if step > 2:
            raise IndexError(step)
        return 0.1

    def schedule(optimizer):
        return LambdaLR(optimizer, initial_learning_rate=0.1, lr_lambda=of)

    trainer_of(
        schedulers=[schedule],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=2),
    ).fit(tiny_batches(2))
    assert labels(messages()[0]) == ROWS


@pytest.mark.parametrize("where", ["start_block", "end_block"])
def test_a_block_that_fails_is_a_warning(trainer_of, messages, warnings, monkeypatch, where):
    monkeypatch.setattr("modelzoo_trainer.loggers.progress." + where, fail)
    trainer = trainer_of()
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 2
    assert sum("RuntimeError: the console is gone" in line for line in warnings()) == 1


@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_a_look_that_fails_ends_nothing(trainer_of, messages, warnings, monkeypatch, progress):
    monkeypatch.setattr(ProgressLogger, "_look", fail)
    monkeypatch.setattr(display, "_LINES_TICK_S", 0.001)
    trainer = trainer_of(progress=progress)
    trainer.fit(tiny_batches(2), tiny_batches(1))
    assert trainer.global_step == 2
    assert messages()[-1].startswith("Finished at step 2")
    trainer.validate(tiny_batches(1))
    assert warnings() == []


def test_a_look_that_fails_does_not_hide_the_error_of_the_run(trainer_of, monkeypatch):
    class Failing(TinyModel):
        def forward(self, batch):
            raise KeyError("of the run")

    monkeypatch.setattr(ProgressLogger, "_look", fail)
    with pytest.raises(KeyError, match="of the run"):
        trainer_of(model=Failing).fit(tiny_batches(2))


def test_lines_are_shown_where_no_bar_can_be(trainer_of, messages, monkeypatch):
    monkeypatch.setattr(display, "Bar", fail)
    trainer_of(progress="bar").fit(tiny_batches(2))
    assert [line.split(" | ")[0] for line in messages()[1:-1]] == ["train step 1/2"]


def test_a_thread_that_cannot_be_started_ends_nothing(trainer_of, messages, monkeypatch):
    def start(thread):
        if thread.name == "progress":
            raise RuntimeError("can't start new thread")
        begin(thread)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    trainer_of(progress="lines").fit(tiny_batches(2))
    assert messages()[-1].startswith("Finished at step 2")


@pytest.mark.parametrize("num_good", [0, 1, 3, 6])
@pytest.mark.parametrize("own", [(), (ProgressBar,)])
def test_a_terminal_that_breaks_ends_nothing(trainer_of, monkeypatch, num_good, own):
    package = logging.getLogger("modelzoo_trainer")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stream = Terminal(num_good)
    handler = logging.StreamHandler(stream)
    trainer = trainer_of(*(callback() for callback in own))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        package.addHandler(handler)
        before = list(package.handlers)
        try:
            trainer.fit(tiny_batches(3), tiny_batches(1))
            assert package.handlers == before
        finally:
            package.removeHandler(handler)
    assert trainer.global_step == 3
    assert not bar._OPEN


def test_a_message_is_written_though_the_bar_cannot_be_taken_away(monkeypatch):
    stream = io.StringIO()
    above = bar._AboveBars(logging.StreamHandler(stream))
    monkeypatch.setattr("tqdm.tqdm.external_write_mode", fail)
    above.handle(logging.LogRecord("a", logging.INFO, "", 0, "hello", (), None))
    assert stream.getvalue() == "hello\n"


def test_results_of_validations_are_silent_too(trainer_of, messages):
    trainer = trainer_of(loggers=[ProgressLogger()], progress="none")
    trainer.fit(tiny_batches(2), tiny_batches(1))
    assert messages() == []


def test_the_default_of_a_file_is_left_out_too(trainer_of):
    trainer = trainer_of(loggers=default_loggers(), progress="none")
    assert [type(logger).__name__ for logger in trainer.loggers] == ["JsonlLogger"]


def test_only_errors_are_caught(caplog):
    with pytest.raises(KeyboardInterrupt), harmless():
        raise KeyboardInterrupt
    numbers = itertools.count(3)
    assert known(lambda: next(numbers), 0) == 3
    assert known(fail, 5) == 5
    assert caplog.records == []
