"""MLflow, with a store of files."""

import math
import subprocess
import sys
import warnings

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, RollBack
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.loggers.mlflow_logger import MLflowLogger, flat

LOGGER = "modelzoo_trainer.mlflow"


@pytest.fixture(autouse=True)
def _files(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings(action="ignore"):  # of its own imports
        pytest.importorskip("mlflow")


@pytest.fixture
def uri(tmp_path):
    return (tmp_path / "store").as_uri()


def runs(uri):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = [e.experiment_id for e in client.search_experiments()]
    return client, client.search_runs(found)


def history(uri, name="loss"):
    client, found = runs(uri)
    (run,) = found
    points = client.get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in points]


class Losses(Callback):
    def __init__(self):
        self.lines = []

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.lines.append((step, metrics["loss"]))


class Extra(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(text="some words", one=torch.ones(1), bad=math.nan, many=torch.ones(3))
        trainer.log_metrics_dict({"odd(name)": 2})


@pytest.mark.slow
def test_numbers_are_points_at_their_steps(make, batches, uri):
    losses = Losses()
    trainer = make(MLflowLogger("exp", "a name", uri, tags={"who": "us"}), callbacks=[losses])
    trainer.fit(batches, batches[:1])
    trainer.close()
    assert history(uri) == losses.lines
    assert [step for step, _ in history(uri, "validate_0/loss")] == [4]
    client, (run,) = runs(uri)
    assert client.get_experiment(run.info.experiment_id).name == "exp"
    assert (run.info.run_name, run.data.tags["who"]) == ("a name", "us")
    assert run.info.status == "FINISHED"


def test_other_values_have_their_kinds(make, batches, uri):
    trainer = make(MLflowLogger(tracking_uri=uri), callbacks=[Extra()], max_steps=1)
    trainer.fit(batches)
    trainer.close()
    assert history(uri, "one") == [(1, 1.0)]
    assert history(uri, "odd_name_") == [(1, 2.0)]
    assert math.isnan(history(uri, "bad")[0][1])
    _, (run,) = runs(uri)
    assert run.data.tags["text"] == "some words"
    assert "many" not in run.data.metrics


def test_a_run_that_resumes_goes_on_and_sends_no_step_twice(make, batches, uri):
    first = make(MLflowLogger(tracking_uri=uri), checkpoint=Checkpoint(steps=2), max_steps=3)
    first.fit(batches)
    first.close()
    second = make(MLflowLogger(tracking_uri=uri), max_steps=5)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4, 5]


def test_a_run_that_begins_anew_is_another_one(make, batches, uri):
    for _ in range(2):
        trainer = make(MLflowLogger(tracking_uri=uri), max_steps=2)
        trainer.fit(batches)
        trainer.close()
    assert len(runs(uri)[1]) == 2


def test_a_run_that_goes_back_sends_no_step_twice(make, batches, uri):
    class GoesBack(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3 and not trainer.data.skipped:
                raise RollBack("bad", step=3, batches=[(0, 2)], cause=ValueError())

    trainer = make(
        MLflowLogger(tracking_uri=uri), callbacks=[GoesBack()], checkpoint=Checkpoint(steps=1)
    )
    trainer.fit(batches)
    trainer.close()
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4]


SETTINGS = {"init": {"seed": 1, "sizes": [4, 5], "loggers": [{"A": {"x": None}}, {}]}, "empty": {}}


def test_settings_are_parameters_of_the_run(make, batches, uri):
    logger = MLflowLogger(tracking_uri=uri)
    logger.take_config(SETTINGS)
    trainer = make(logger, max_steps=1)
    trainer.fit(batches)
    trainer.close()
    _, (run,) = runs(uri)
    assert run.data.params == {
        "init.seed": "1",
        "init.sizes": "[4, 5]",
        "init.loggers.0.A.x": "None",
        "init.loggers.1": "{}",
        "empty": "{}",
    }


def test_many_and_long_settings_are_shown(make, batches, uri):
    logger = MLflowLogger(tracking_uri=uri)
    logger.take_config({f"name (of) {idx}": "x" * 9000 for idx in range(250)})
    trainer = make(logger, max_steps=1)
    trainer.fit(batches)
    trainer.close()
    _, (run,) = runs(uri)
    assert len(run.data.params) == 250
    assert run.data.params["name _of_ 7"] == "x" * 500


def test_a_run_that_goes_on_keeps_its_first_settings(make, batches, uri, caplog):
    for steps, config in [(2, {"a": 1, "b": 1}), (4, {"a": 2, "b": 1, "c": 3})]:
        logger = MLflowLogger(tracking_uri=uri)
        logger.take_config(config)
        trainer = make(logger, checkpoint=Checkpoint(steps=2), max_steps=steps)
        with caplog.at_level("INFO"):
            trainer.fit(batches)
        trainer.close()
    _, (run,) = runs(uri)
    assert run.data.params == {"a": "1", "b": "1", "c": "3"}
    assert [r.getMessage() for r in caplog.records if "keeping the first" in r.getMessage()] == [
        "MLflowLogger: MLflow cannot change the parameters of a run; keeping the first values of a."
    ]
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4]


def test_settings_that_are_refused_do_not_stop_the_metrics(make, batches, uri, monkeypatch, caplog):
    logger = MLflowLogger(tracking_uri=uri)
    logger.take_config({"a": 1})

    def refuse(config):
        raise OSError("too many")

    monkeypatch.setattr(logger, "_show", refuse)
    trainer = make(logger)
    trainer.fit(batches)
    trainer.close()
    assert [step for step, _ in history(uri)] == [1, 2, 3, 4]
    assert "MLflowLogger could not log the settings: OSError: too many" in caplog.text


YAML = """\
trainer:
  init:
    model_dir: {folder}
    model: {{name: fc_mnist, hidden_sizes: [4]}}
    loggers: [{{MLflowLogger: {{tracking_uri: "https://me:pass@host/x"}}}}]
"""


def test_a_file_gives_its_settings_without_secrets(tmp_path):
    text = YAML.format(folder=tmp_path / "run")
    (plan,) = check_config(read_text(text, "p.yaml"), shipped_names(), mode=None)
    plan.resolved["trainer"]["init"]["hub_token"] = "secret"
    with plan.build() as trainer:
        logger = next(known for known in trainer.loggers if isinstance(known, MLflowLogger))
        shown = dict(flat(logger._config))
    assert shown["trainer.init.model.name"] == "fc_mnist"
    assert not any("secret" in text for text in shown.values())
    assert shown["trainer.init.loggers.0.MLflowLogger.tracking_uri"] == "https://***@host/x"


def test_a_server_that_is_not_there_is_told_once(make, batches, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    trainer = make(MLflowLogger(tracking_uri="http://127.0.0.1:9"))
    trainer.fit(batches)
    trainer.close()
    assert trainer.global_step == 4
    told = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert len(told) == 1
    assert told[0].startswith("MLflowLogger failed to start; metrics are not sent: ")


def test_a_server_that_goes_away_does_not_stop_the_run(make, batches, uri, monkeypatch, caplog):
    from mlflow import MlflowClient

    def gone(self, *args, **settings):
        raise ConnectionError("no network")

    monkeypatch.setattr(MlflowClient, "log_batch", gone)
    monkeypatch.setattr("modelzoo_trainer.loggers.mlflow_logger.SEND_INTERVAL_S", 0.0)
    trainer = make(MLflowLogger(tracking_uri=uri))
    trainer.fit(batches)
    trainer.close()
    assert trainer.global_step == 4
    told = [r.getMessage() for r in caplog.records if r.name == "modelzoo_trainer.logging"]
    assert len(told) == 1
    assert told[0].startswith("MLflowLogger failed to log metrics (some are lost): ConnectionError")


def test_no_experiment_is_refused():
    with pytest.raises(ConfigError, match=r"MLflowLogger.experiment_name: .* not empty, got ''"):
        MLflowLogger("")


def test_without_the_library_the_extra_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelzoo-trainer\[mlflow\]'"):
        make(MLflowLogger())


@pytest.mark.slow
def test_nothing_of_it_is_imported_before_it_is_used():
    code = "import sys, modelzoo_trainer.loggers.mlflow_logger; assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
