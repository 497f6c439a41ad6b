"""A run that resumes from a checkpoint before a validation of the same step: all values once."""

import csv
import json
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import RunHistory
from modelzoo_trainer.loggers import CSVLogger, JsonlLogger, MLflowLogger, TensorBoardLogger

NAMES = ("loss", "train_loss_epoch", "validate_0/loss", "test/loss")


def in_tensorboard(folder):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder / "events"))
    found.Reload()
    known = set(NAMES) & set(found.Tags()["scalars"])
    return [(name, one.step) for name in known for one in found.Scalars(name)]


def in_csv(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(name, int(row["step"])) for row in rows for name in NAMES if row[name]]


def in_jsonl(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(name, line["step"]) for line in lines for name in NAMES if name in line]


def in_mlflow(folder):
    with warnings.catch_warnings(action="ignore"):  # of its own imports
        from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    points = {name: client.get_metric_history(run.info.run_id, name) for name in NAMES}
    return [(name, point.step) for name in NAMES for point in points[name]]


class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, batch):
        return super().forward(batch).square().mean()


class Die(Callback):
    """Ends the fit as a fault would, at a step; after a checkpoint and its validation."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("the end")


@pytest.fixture
def run(tmp_path):
    """Trains two epochs of four batches, or dies in the third; then to the end of the third."""

    def make(logger, epochs, callbacks):
        return Trainer(
            device="cpu",
            model=Model(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            seed=1,
            model_dir=tmp_path,
            checkpoint=Checkpoint(epochs=1),
            loop=TrainingLoop(num_epochs=epochs, eval_frequency="epoch"),
            loggers=[logger],
            callbacks=callbacks,
        )

    def act(kind, dies):
        data, held_out = [torch.ones(2, 4)] * 4, [torch.ones(2, 4)]
        with make(kind(), 3 if dies else 2, [RunHistory(), Die(10 if dies else -1)]) as first:
            if dies:
                with pytest.raises(RuntimeError, match="the end"):
                    first.fit(data, held_out)
            else:
                first.fit(data, held_out)
            first.test(held_out)
        history = RunHistory()
        with make(kind(), 3, [history]) as second:
            second.fit(data, held_out)
        return history

    return act


def mlflow_logger(folder):
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("mlflow")
    return MLflowLogger(tracking_uri=(folder / "mlflow").as_uri())


KINDS = {
    "tensorboard": (lambda _: TensorBoardLogger(), in_tensorboard),
    "csv": (lambda _: CSVLogger(), in_csv),
    "jsonl": (lambda _: JsonlLogger(), in_jsonl),
    "mlflow": (mlflow_logger, in_mlflow),
}
ONCE = {
    **{("loss", step): 1 for step in range(1, 13)},
    **{("train_loss_epoch", step): 1 for step in (4, 8, 12)},
    **{("validate_0/loss", step): 1 for step in (4, 8, 12)},
}


@pytest.mark.parametrize("dies", [False, True], ids=["ended", "died"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_cases(every=4)
def test_a_resumed_run_logs_each_value_once(kind, dies, run, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    logger, read = KINDS[kind]
    history = run(lambda: logger(tmp_path), dies)
    found = Counter(read(tmp_path))
    tests = {} if dies and kind != "mlflow" else {("test/loss", 10 if dies else 8): 1}
    assert found == ONCE | tests
    for name in NAMES[:3]:
        assert history.get_metric_steps(name) == [step for own, step in ONCE if own == name]
