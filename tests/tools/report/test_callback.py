import os
import sys
from types import SimpleNamespace

import pytest

from modelzoo_trainer import Callback, ConfigError
from modelzoo_trainer.callbacks import Report
from modelzoo_trainer.loggers import JsonlLogger
from modelzoo_trainer.tools.report import callback as module
from modelzoo_trainer.tools.report.page import MARKER


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", "modelzoo_trainer.report")
    return lambda: [record.getMessage() for record in caplog.records if "eport" in record.message]


@pytest.mark.slow
def test_the_report_is_there_when_a_fit_has_ended(make, batches, warnings):
    trainer = make(Report(), loggers=JsonlLogger())
    trainer.fit(batches, batches[:2])
    html = (trainer.model_dir / "report.html").read_text()
    assert MARKER in html
    assert '<span class="state finished">' in html
    assert "validate_0/loss" in html
    assert warnings() == []


@pytest.mark.slow
def test_it_is_there_after_a_validation_alone(make, batches, tmp_path):
    trainer = make(Report(path=tmp_path / "of_validation.html"), loggers=JsonlLogger())
    trainer.validate(batches[:2])
    assert "validate_0/loss" in (tmp_path / "of_validation.html").read_text()


class Fail(Callback):
    def on_step_boundary(self, trainer):
        if trainer.global_step == 3:
            raise ValueError("of the user")


@pytest.mark.slow
def test_it_tells_how_a_fit_has_failed(make, batches):
    trainer = make(Report(), Fail(), loggers=JsonlLogger())
    with pytest.raises(ValueError, match="of the user"):
        trainer.fit(batches)
    html = (trainer.model_dir / "report.html").read_text()
    assert '<span class="state failed"' in html
    assert "ValueError: of the user" in html


class Count:
    """Stands for `subprocess.Popen`: counts, and is done at once."""

    returncode = 0
    stderr = None
    pid = os.getpid()

    def __init__(self):
        self.num = 0

    def __call__(self, *args, **options):
        self.num += 1
        return self

    def poll(self):
        return 0

    def wait(self, timeout):
        return 0


@pytest.fixture
def started(monkeypatch):
    count = Count()
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=count, DEVNULL=-3, PIPE=-1))
    monkeypatch.setattr(module.os, "setpriority", lambda *args: None)
    return count


@pytest.fixture
def clock(monkeypatch):
    """Ten seconds more at each look."""
    now = [0.0]

    def look():
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", look)
    return now


def test_it_is_written_during_the_run_but_not_more_often_than_asked(make, batches, started, clock):
    make(Report(interval_s=55), loggers=JsonlLogger(), max_steps=10).fit(batches)
    assert 2 <= started.num <= 4


@pytest.mark.parametrize(("used", "num"), [(0.1, 13), (100.0, 2), (0.0, 2)])
def test_the_pause_depends_on_the_cpu_time_of_a_report_if_known(
    used, num, make, batches, started, clock, monkeypatch
):
    """Each takes at least 20 seconds of the clock, of which it may have waited for a core."""
    spent = [0.0]

    def times():
        spent[0] += used
        return SimpleNamespace(children_user=spent[0], children_system=0.0)

    monkeypatch.setattr(module.os, "times", times)
    make(Report(interval_s=5), loggers=JsonlLogger(), max_steps=12).fit(batches)
    assert started.num == pytest.approx(num, abs=1)


def test_without_the_time_it_is_written_at_the_end_only(make, batches, started):
    make(Report(interval_s=3600), loggers=JsonlLogger(), max_steps=10).fit(batches, batches[:1])
    assert started.num == 1


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_one_warning(make, batches, warnings):
    trainer = make(Report(), loggers=JsonlLogger())
    (trainer.model_dir / "report.html").write_text("mine")
    trainer.fit(batches)
    trainer.validate(batches[:1])
    (told,) = warnings()
    assert str(trainer.model_dir / "report.html") in told
    assert (trainer.model_dir / "report.html").read_text() == "mine"
    assert trainer.global_step == 4


def test_a_process_that_cannot_be_started_is_one_warning(make, batches, warnings, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/none/python")
    trainer = make(Report(), loggers=JsonlLogger())
    trainer.fit(batches)
    (told,) = warnings()
    assert "/none/python" in told
    assert trainer.global_step == 4


def test_without_a_jsonl_logger_there_is_a_warning_and_no_report(make, batches, warnings):
    trainer = make(Report())
    trainer.fit(batches)
    (told,) = warnings()
    assert "JsonlLogger" in told
    assert not (trainer.model_dir / "report.html").exists()


def test_without_plotly_it_is_refused_with_the_remedy(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"modelzoo-trainer\[report\]"):
        make(Report(), loggers=JsonlLogger())


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan")])
def test_an_interval_must_be_positive(interval_s):
    with pytest.raises(ConfigError, match="interval_s"):
        Report(interval_s=interval_s)
