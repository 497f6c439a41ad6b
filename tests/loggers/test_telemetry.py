import logging

import pytest

from modelzoo_trainer import ConfigError, Logger
from modelzoo_trainer.loggers.telemetry import TelemetryLogger


class History(Logger):
    def __init__(self):
        self.steps = []

    def log_metrics(self, metrics, step):
        self.steps.append(step)


class Telemetry(TelemetryLogger):
    """Notes what reaches it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def log_metrics(self, metrics, step):
        self.found.append((step, metrics))


def test_it_takes_only_what_is_meant_for_it(make, batches):
    telemetry, history = Telemetry(), History()
    trainer = make(telemetry, history)
    trainer.fit(batches)
    assert (telemetry.found, history.steps) == ([], [1, 2, 3, 4])
    trainer.log_metrics_dict({"ml_flops": 1.0}, dest="Telemetry")
    trainer.drain()
    assert (telemetry.found, history.steps) == ([(4, {"ml_flops": 1.0})], [1, 2, 3, 4])


def test_that_nothing_is_sent_is_said_once(make, batches, caplog):
    with caplog.at_level(logging.INFO, logger="modelzoo_trainer.telemetry"):
        trainer = make(TelemetryLogger(64, 10))
        trainer.fit(batches)
        trainer.fit(batches)
        trainer.log_metrics_dict({"ml_flops": 1.0}, dest="TelemetryLogger")
        trainer.drain()
    assert [r.getMessage() for r in caplog.records if r.name.endswith("telemetry")] == [
        "TelemetryLogger drops its metrics: it is accepted only for compatibility."
    ]


@pytest.mark.parametrize("name", ["max_buffer_size", "max_buffer_seconds"])
@pytest.mark.parametrize("value", [0, -3, 2.5])
def test_what_does_not_fit_is_refused(name, value):
    with pytest.raises(
        ConfigError, match=rf"TelemetryLogger\.{name}: expected an integer > 0, got {value}"
    ):
        TelemetryLogger(**{name: value})
