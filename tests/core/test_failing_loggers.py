"""A logger that fails costs metrics, never the run."""

from __future__ import annotations

import pytest

from backends import HostReadError
from modelzoo_trainer import ConfigError, Logging, StopTraining, TrainingLoop
from tests.doubles import History, tiny_batches

WARNING = "Broken failed to log metrics (some are lost): ValueError: no connection"


class Broken(History):
    """Fails at some steps, and when it is flushed if it is told so."""

    def __init__(self, *steps, error=ValueError, flush=None) -> None:
        super().__init__()
        self.bad, self.error, self.flush_error = steps, error, flush

    def log_metrics(self, metrics, step):
        if step in self.bad:
            raise self.error("no connection")
        super().log_metrics(metrics, step)

    def flush(self):
        if self.flush_error is not None:
            raise self.flush_error("no connection")


def told(caplog) -> list[str]:
    found = [r for r in caplog.records if r.name == "modelzoo_trainer.logging"]
    return [record.getMessage() for record in found if record.levelname == "WARNING"]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_training_goes_on_and_others_get_their_metrics(trainer_of, caplog, device) -> None:
    broken, history = Broken(2, 3), History()
    trainer = trainer_of(loggers=[broken, history], logging=Logging(), device=device)
    trainer.fit(tiny_batches(4))
    assert (broken.steps, history.steps) == ([1, 4], [1, 2, 3, 4])
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith(WARNING)


def test_each_of_several_is_told_of(trainer_of, caplog) -> None:
    trainer_of(loggers=[Broken(1), Broken(2)], logging=Logging()).fit(tiny_batches(4))
    assert len(told(caplog)) == 2


def test_a_second_fit_tells_of_it_again(trainer_of, caplog) -> None:
    loop = TrainingLoop(num_steps=2)
    trainer = trainer_of(loggers=Broken(1, 3), logging=Logging(), loop=loop)
    trainer.fit(tiny_batches(4))
    trainer.fit(tiny_batches(4))
    assert len(told(caplog)) == 2


def test_a_flush_that_fails_does_not_fail_the_run(trainer_of, caplog) -> None:
    trainer = trainer_of(loggers=Broken(flush=OSError), logging=Logging())
    trainer.fit(tiny_batches(4))
    assert trainer.global_step == 4
    assert "OSError: no connection" in told(caplog)[0]


def test_what_is_sent_to_it_alone_is_guarded_too(trainer_of, caplog) -> None:
    trainer = trainer_of(loggers=Broken(7))
    trainer.log_metrics_dict({"value": 3}, step=7, dest="Broken")
    trainer.drain()
    assert told(caplog)[0].startswith(WARNING)


def test_an_error_of_this_package_is_meant(trainer_of) -> None:
    with pytest.raises(ConfigError, match="no connection"):
        trainer_of(loggers=Broken(2, error=ConfigError)).fit(tiny_batches(4))


def test_a_logger_may_stop_the_run(trainer_of) -> None:
    trainer = trainer_of(loggers=Broken(2, error=StopTraining))
    trainer.fit(tiny_batches(4))
    assert trainer.global_step == 2


def test_an_interrupt_is_no_failure_of_the_logger(trainer_of) -> None:
    with pytest.raises(SystemExit):
        trainer_of(loggers=Broken(2, error=SystemExit)).fit(tiny_batches(4))


def test_an_error_of_the_device_is_not_taken_for_one_of_the_logger(trainer_of) -> None:
    trainer = trainer_of(loggers=Broken(2, error=HostReadError), logging=Logging())
    with pytest.raises(HostReadError):
        trainer.fit(tiny_batches(4))
