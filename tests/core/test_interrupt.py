"""The message of a signal says what a second one does."""

import os
import signal

import pytest

from modelzoo_trainer import Callback
from tests.doubles import tiny_batches


class Kill(Callback):
    def __init__(self, number):
        self.number = number

    def on_step_boundary(self, trainer):
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "error", "how"),
    [
        (signal.SIGINT, KeyboardInterrupt, "SIGINT: stopping after this step; press Ctrl-C again"),
        (signal.SIGTERM, SystemExit, "SIGTERM: stopping after this step; send SIGINT"),
    ],
)
def test_the_message_names_the_signal_that_stops_at_once(number, error, how, trainer_of, capfd):
    with pytest.raises(error):
        trainer_of(Kill(number)).fit(tiny_batches(2))
    assert how in capfd.readouterr().err
