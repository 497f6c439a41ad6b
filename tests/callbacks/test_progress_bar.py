"""A bar for each pass: on a terminal, beside others, and gone at the end."""

import io
import logging
import re
import sys
from contextlib import contextmanager

import pytest

from modelzoo_trainer import Callback, Checkpoint, TrainingLoop
from modelzoo_trainer.callbacks import progress
from modelzoo_trainer.callbacks.progress import ProgressBar
from modelzoo_trainer.loggers import ProgressLogger
from modelzoo_trainer.loggers.console.bar import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def on_terminal(monkeypatch, stream):
    """Make standard error a terminal, with a handler of the program's own."""
    handler = logging.StreamHandler(stream)
    package = logging.getLogger("modelzoo_trainer")
    package.addHandler(handler)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(progress, "BAR_INTERVAL_S", 0.0)
        yield stream
    package.removeHandler(handler)


def test_each_pass_and_each_validation_has_one(make, batches, monkeypatch):
    trainer = make(ProgressBar(), loop=TrainingLoop(num_epochs=2, eval_steps=2))
    with on_terminal(monkeypatch, Terminal()) as terminal:
        trainer.fit(batches[:3], batches[:5])
    text = terminal.getvalue()
    assert re.findall(r"(epoch \d).*?3/3", text)[-1] == "epoch 2"
    assert "epoch 1: 100%" in text
    assert "validate_0: 100%" in text
    assert "2/2" in text
    assert re.search(r"epoch 1: .*loss=?\s?\d\.\d{5}|epoch 1: .*loss \d\.\d{5}", text)


def test_a_pass_that_is_taken_up_again_begins_there(make, batches, monkeypatch):
    make(max_steps=2, checkpoint=Checkpoint(steps=2)).fit(batches)
    with on_terminal(monkeypatch, Terminal()) as terminal:
        make(ProgressBar(), max_steps=4).fit(batches)
    shown = re.findall(r"(\d+)/10", terminal.getvalue())
    assert shown[0] == "2"
    assert shown[-1] == "4"


def test_nothing_is_shown_but_on_a_terminal(make, batches, monkeypatch):
    trainer = make(ProgressBar())
    with on_terminal(monkeypatch, io.StringIO()) as stream:
        trainer.fit(batches, batches[:1])
    assert "epoch" not in stream.getvalue()
    assert "%" not in stream.getvalue()


def test_beside_the_logger_messages_and_handlers_stay_whole(make, batches, monkeypatch):
    loop = TrainingLoop(num_epochs=2, eval_frequency=3)
    trainer = make(ProgressBar(), loop=loop, loggers=[ProgressLogger(interval_s=0.0)])
    with on_terminal(monkeypatch, Terminal()) as terminal:
        before = list(logging.getLogger("modelzoo_trainer").handlers)
        trainer.fit(batches[:4], batches[:2])
        assert logging.getLogger("modelzoo_trainer").handlers == before
    text = terminal.getvalue()
    assert "train: " in text
    assert "epoch 2: " in text
    assert text.count("validate_0: loss") == 3


def test_it_is_gone_after_a_failure(make, batches, monkeypatch):
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            raise RuntimeError("stop")

    trainer = make(ProgressBar(), Fail(), loggers=[ProgressLogger()])
    with on_terminal(monkeypatch, Terminal()):
        before = list(logging.getLogger("modelzoo_trainer").handlers)
        with pytest.raises(RuntimeError):
            trainer.fit(batches)
        assert logging.getLogger("modelzoo_trainer").handlers == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_bars_that_close_in_any_order_leave_the_handlers_as_they_were(monkeypatch, order):
    with on_terminal(monkeypatch, Terminal()):
        before = list(logging.getLogger("modelzoo_trainer").handlers)
        bars = [Bar(0, 3, "a"), Bar(0, 3, "b")]
        assert logging.getLogger("modelzoo_trainer").handlers != before
        for number in order:
            bars[number].close()
            bars[number].close()
        assert logging.getLogger("modelzoo_trainer").handlers == before
