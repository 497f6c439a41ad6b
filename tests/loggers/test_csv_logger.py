import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, RollBack, TrainingLoop
from modelzoo_trainer.loggers.csv_logger import CSVLogger, CsvTable, to_row
from modelzoo_trainer.loggers.jsonl import JsonlLogger

LOGGER = "modelzoo_trainer.csv"


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(path):
    return [int(row["step"]) for row in rows_of(path)]


def without_times(path):
    return [{k: v for k, v in row.items() if k != "time"} for row in rows_of(path)]


class Losses(Callback):
    def __init__(self):
        self.lines = []

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.lines.append((step, metrics["loss"]))


class LogsLater(Callback):
    """Logs one more metric from a step on."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step >= self.step:
            trainer.log_metrics(later=trainer.global_step * 10)


def test_each_step_is_a_row_with_all_digits(make, batches):
    losses = Losses()
    trainer = make(CSVLogger(), callbacks=[losses])
    trainer.fit(batches)
    found = rows_of(trainer.model_dir / "metrics.csv")
    assert [(int(row["step"]), float(row["loss"])) for row in found] == losses.lines
    assert (trainer.model_dir / "metrics.csv").read_text().startswith("step,time,loss\n1,")


def test_a_later_metric_gets_a_column_that_is_empty_before(make, batches):
    logger = CSVLogger()
    trainer = make(logger, callbacks=[LogsLater(3)])
    trainer.fit(batches, batches[:1])
    found = rows_of(trainer.model_dir / "metrics.csv")
    assert list(found[0]) == ["step", "time", "loss", "later", "validate_0/loss"]
    assert [row["later"] for row in found] == ["", "", "30", "40", ""]
    assert [row["validate_0/loss"] != "" for row in found] == [False] * 4 + [True]


def test_a_column_may_come_after_rows_have_been_written(tmp_path):
    table = CsvTable(tmp_path / "t.csv")
    table.append([{"step": "1", "time": "2.5", "loss": "3"}])
    table.append([{"step": "2", "time": "3.5", "other": "a,b"}])
    table.append([{"step": "3", "time": "4.5", "loss": "4"}])
    table.close()
    assert (tmp_path / "t.csv").read_text() == (
        'step,time,loss,other\n1,2.5,3,\n2,3.5,,"a,b"\n3,4.5,4,\n'
    )


def test_the_file_can_be_chosen(make, batches, tmp_path):
    make(CSVLogger(tmp_path / "there" / "it.csv")).fit(batches)
    assert steps_of(tmp_path / "there" / "it.csv") == [1, 2, 3, 4]


def test_a_second_fit_appends(make, batches):
    trainer = make(CSVLogger(), loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    trainer.fit(batches)
    assert steps_of(trainer.model_dir / "metrics.csv") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (0.1, "0.1"),
        (1e-30, "1e-30"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (True, "True"),
        (7, "7"),
        (torch.tensor([2.5]), "2.5"),
        (np.float64(2.5), "2.5"),
        ("two\nlines", "two\\nlines"),
    ],
)
def test_a_value_becomes_a_cell(value, cell):
    assert to_row({"it": value}, 3, 4.5) == {"step": "3", "time": "4.5", "it": cell}


@pytest.mark.parametrize("value", [torch.ones(2), [1, 2], None, object()])
def test_what_has_no_place_in_a_cell_is_left_out(value):
    assert to_row({"it": value}, 3, 4.5) == {"step": "3", "time": "4.5"}


def test_a_metric_called_step_does_not_hide_the_step():
    row = to_row({"step": 9, "time": 8}, 3, 4.5)
    assert row == {"step": "3", "time": "4.5", "step_": "9", "time_": "8"}


# ---- going back


def test_a_run_that_resumes_has_the_rows_of_one_that_was_not_broken(make, batches, tmp_path):
    saved = Checkpoint(steps=2)
    first = make(CSVLogger(), checkpoint=saved, max_steps=3, callbacks=[LogsLater(3)])
    first.fit(batches, batches[:1])
    first.close()
    second = make(CSVLogger(), checkpoint=Checkpoint(steps=2), callbacks=[LogsLater(3)])
    second.fit(batches, batches[:1], ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    whole = make(
        CSVLogger(),
        model_dir=tmp_path / "whole",
        checkpoint=Checkpoint(steps=2),
        callbacks=[LogsLater(3)],
    )
    whole.fit(batches, batches[:1])
    whole.close()
    found = without_times(second.model_dir / "metrics.csv")
    wanted = without_times(whole.model_dir / "metrics.csv")
    trained = [row for row in found if row["loss"]]
    assert trained == [row for row in wanted if row["loss"]]
    assert steps_of(second.model_dir / "metrics.csv") == [1, 2, 3, 4, 4]


def test_rows_of_the_checkpoints_step_that_came_after_it_are_taken_back(make, batches):
    first = make(CSVLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.log_metrics(after=1)
    first.drain()
    first.close()
    assert steps_of(first.model_dir / "metrics.csv") == [1, 2, 2]
    second = make(CSVLogger(), max_steps=3)
    second.fit(batches)
    second.close()
    assert steps_of(second.model_dir / "metrics.csv") == [1, 2, 3]


def test_another_table_is_cut_by_its_steps(make, batches, tmp_path):
    first = make(CSVLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    own = tmp_path / "own.csv"
    own.write_text("step,time,loss\n1,5.0,1\n2,6.0,2\n3,7.0,3\n")
    second = make(CSVLogger(own), max_steps=3)
    second.fit(batches)
    second.close()
    assert [row["time"] for row in rows_of(own)][:2] == ["5.0", "6.0"]
    assert steps_of(own) == [1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_run_that_goes_back_takes_its_rows_back(make, batches, device):
    class GoesBack(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3 and not trainer.data.skipped:
                raise RollBack("bad", step=3, batches=[(0, 2)], cause=ValueError())

    trainer = make(
        CSVLogger(), callbacks=[GoesBack()], checkpoint=Checkpoint(steps=2), device=device
    )
    trainer.fit(batches)
    trainer.close()
    assert steps_of(trainer.model_dir / "metrics.csv") == [1, 2, 3, 4]


def test_a_run_that_begins_anew_leaves_the_table_of_others(make, batches, caplog):
    first = make(CSVLogger(), max_steps=2)
    first.fit(batches)
    first.close()
    second = make(CSVLogger(), max_steps=3)
    second.fit(batches)
    second.close()
    folder = second.model_dir
    assert steps_of(folder / "metrics.csv") == [1, 2, 3]
    (aside,) = folder.glob("metrics-*.csv")
    assert steps_of(aside) == [1, 2]
    assert any(record.name == LOGGER for record in caplog.records)


def test_texts_of_any_kind_do_not_cost_other_metrics(make, batches):
    class Texts(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(odd="\ud800", long="x" * 200_000)

    trainer = make(CSVLogger(), callbacks=[Texts(), LogsLater(3)])
    trainer.fit(batches)
    trainer.close()
    rows = rows_of(trainer.model_dir / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert {(row["odd"], len(row["long"])) for row in rows} == {("\\ud800", 32_767)}


def test_a_file_that_is_no_text_does_not_stop_a_run_that_resumes(make, batches, caplog):
    first = make(CSVLogger(), max_steps=2, checkpoint=Checkpoint(steps=2))
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.csv"
    path.write_bytes(b"\xff\xfe\n")
    second = make(CSVLogger(), max_steps=4, checkpoint=Checkpoint(steps=2))
    second.fit(batches)
    assert second.global_step == 4
    assert path.read_bytes() == b"\xff\xfe\n"
    assert caplog.text.count("so metrics are lost") == 1


@pytest.mark.parametrize("kinds", [(CSVLogger, CSVLogger), (JsonlLogger, CSVLogger)])
def test_two_loggers_of_one_file_are_refused(make, tmp_path, kinds):
    path = tmp_path / "run" / "metrics.csv"
    with pytest.raises(ConfigError, match=r"both write to '.*metrics\.csv'"):
        make(kinds[0](path), kinds[1]())
    make(kinds[0](tmp_path / "other"), kinds[1]())


def test_a_row_that_a_crash_cut_off_is_removed(make, batches):
    first = make(CSVLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.csv"
    path.write_text(path.read_text() + "3,17000")
    second = make(CSVLogger(), max_steps=3)
    second.fit(batches)
    second.close()
    assert steps_of(path) == [1, 2, 3]
    assert all(row["loss"] for row in rows_of(path))


def test_results_of_tests_stay_in_the_table_of_a_run_that_resumes(make, batches):
    first = make(CSVLogger(), checkpoint=Checkpoint(steps=2), max_steps=3)
    first.fit(batches)
    first.close()
    for step in (2, 3):
        other = make(CSVLogger())
        other.test(batches[:1], ckpt_path=first.model_dir / f"checkpoint_{step}")
        other.close()
    second = make(CSVLogger(), max_steps=4)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    rows = rows_of(first.model_dir / "metrics.csv")
    assert [row["step"] for row in rows if row["test/loss"]] == ["2"]
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3", "4"]


def test_an_empty_table_has_a_place_too(tmp_path):
    assert CsvTable(tmp_path / "none.csv").end() == {"num_rows": 0, "last": ["", ""]}


def test_a_file_that_cannot_be_written_is_told_once_and_training_goes_on(
    make, batches, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    trainer = make(CSVLogger(tmp_path / "file" / "metrics.csv"))
    trainer.fit(batches)
    trainer.close()
    assert trainer.global_step == 4
    told = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert len(told) == 1
    assert "so metrics are lost" in told[0]
