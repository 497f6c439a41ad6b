"""The worker and the callback for Ray Train, without Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, Logging, ObjectStore, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import RayTrainReport
from modelzoo_trainer.cli.ray_worker import WorkerStopped, worker
from modelzoo_trainer.errors import ConfigError

FILE = """
trainer:
  init:
    device: cpu
    seed: 1
    progress: none
    model_dir: {folder}
    model: {{name: fc_mnist, hidden_sizes: [8], input_size: 64}}
    optimizer: {{SGD: {{lr: 0.1}}}}
    loop: {{max_steps: 4}}
    checkpoint: {{steps: 2}}
    logging: {{log_steps: 1}}
  fit:
    train_dataloader: {{data_processor: DigitsProcessor, split: train, batch_size: 16}}
"""


class FakeCheckpoint:
    def __init__(self, folder: str) -> None:
        self.pointer = json.loads((Path(folder) / "checkpoint.json").read_text(encoding="utf-8"))

    @classmethod
    def from_directory(cls, folder: str) -> FakeCheckpoint:
        return cls(folder)


class FakeRayTrain(ModuleType):
    """What the callback uses of `ray.train`."""

    Checkpoint = FakeCheckpoint

    def __init__(self) -> None:
        super().__init__("ray.train")
        self.reports: list[tuple[dict[str, Any], FakeCheckpoint | None]] = []
        self.is_worker = True
        self.is_restart = False
        self.asked = 0
        self.preempted_at: int | None = None

    def get_context(self) -> Any:
        if not self.is_worker:
            raise RuntimeError("outside of a Ray Train training function")
        return self

    def get_world_rank(self) -> int:
        return 0

    def get_checkpoint(self) -> object:
        return self.is_restart or None

    def get_preemption_info(self) -> object:
        self.asked += 1
        return None if self.asked != self.preempted_at else "info"

    def report(self, metrics: dict[str, Any], checkpoint: FakeCheckpoint | None = None) -> None:
        json.dumps(metrics, allow_nan=False)
        self.reports.append((metrics, checkpoint))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> FakeRayTrain:
    fake, ray = FakeRayTrain(), ModuleType("ray")
    ray.train = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", fake)
    return fake


@pytest.fixture
def params(tmp_path: Path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(FILE.format(folder=tmp_path / "run"), encoding="utf-8")
    return path


# ---- worker


def test_a_worker_runs_the_file_and_reports(params: Path, train: FakeRayTrain) -> None:
    assert worker(params)({}) == 0
    metrics, checkpoint = train.reports[-1]
    newest = str(params.parent / "run" / "checkpoint_4")
    assert checkpoint is not None
    assert checkpoint.pointer == {"path": newest, "step": 4}
    assert metrics["checkpoint_path"] == newest
    assert metrics["step"] == 4
    assert metrics["loss"] > 0


def test_options_and_settings_are_those_of_the_command_line(
    params: Path, train: FakeRayTrain
) -> None:
    run = worker(params, "--max_steps", "6", set={"init.optimizer.SGD.lr": 0.2})
    run({"model_dir": str(params.parent / "other"), "init.optimizer.SGD.lr": 3e-5})
    assert train.reports[-1][0]["step"] == 6
    assert train.reports[-1][0]["lr/0"] == pytest.approx(3e-5)
    assert (params.parent / "other" / "checkpoint_6").is_dir()


def test_relative_paths_are_those_of_the_program_that_starts_the_workers(
    params: Path, train: FakeRayTrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(params.parent)
    run = worker("params.yaml", model_dir="relative")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run({}) == 0
    assert (params.parent / "relative" / "checkpoint_4").is_dir()


def test_the_file_and_the_options_are_checked_before_there_are_workers(params: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_step.*max_steps"):
        worker(params, max_step=3)
    with pytest.raises(ConfigError, match="--epochs"):
        worker(params, "--epochs", "3")
    with pytest.raises(ConfigError, match=r"optimizer.*lrr"):
        worker(params, set={"init.optimizer.SGD.lrr": 1})
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        worker(params.with_name("absent.yaml"))


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        raise ValueError("a bad batch")


def test_a_run_that_fails_raises(
    params: Path, train: FakeRayTrain, capfd: pytest.CaptureFixture[str]
) -> None:
    run = worker(params)
    with Fails(), pytest.raises(ValueError, match="a bad batch"):
        run({})
    train.reports.clear()
    with pytest.raises(WorkerStopped, match="exit code 2"):
        run({"init.optimizer.SGD.lr": -1.0})
    assert train.reports == []
    assert "lr" in capfd.readouterr().err


class Stops(Callback):
    """Makes the stop file, or sends a signal to itself."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.early_exit.interrupt(self.reason)


@pytest.mark.parametrize("reason", ["stop file", "max_time"])
def test_a_run_that_is_stopped_on_purpose_returns_143(
    params: Path, train: FakeRayTrain, reason: str
) -> None:
    with Stops(reason):
        assert worker(params)({}) == 143
    assert train.reports[-1][0]["step"] == 1


def test_a_run_that_a_signal_stops_raises_so_that_ray_starts_it_again(
    params: Path, train: FakeRayTrain
) -> None:
    with Stops("SIGUSR1"), pytest.raises(WorkerStopped, match=r"exit code 143.*SIGUSR1"):
        worker(params)({})


# ---- callback


class Model(torch.nn.Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).square().mean()


def make_trainer(folder: Path, **given: Any) -> Trainer:
    return Trainer(
        device="cpu",
        model=lambda: Model(4, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=6),
        model_dir=folder,
        progress="none",
        **given,
    )


BATCHES = [torch.ones(8, 4)] * 10


def test_it_reports_after_each_checkpoint_and_at_the_end(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RayTrainReport()], checkpoint=Checkpoint(steps=2))
    trainer.fit(BATCHES)
    pointers = [checkpoint and checkpoint.pointer["step"] for _, checkpoint in train.reports]
    assert pointers == [2, 4, 6, 6]


def test_it_reports_every_steps_steps(tmp_path: Path, train: FakeRayTrain) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RayTrainReport(steps=4)])
    trainer.fit(BATCHES)
    assert [metrics["step"] for metrics, _ in train.reports][:1] == [4]
    with pytest.raises(ConfigError, match="steps"):
        RayTrainReport(steps=0)


def test_checkpoints_in_the_background_are_reported_once_they_are_written(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    checkpoint = Checkpoint(steps=2, asynchronous=True)
    trainer = make_trainer(tmp_path, callbacks=[RayTrainReport()], checkpoint=checkpoint)
    trainer.fit(BATCHES)
    assert len(train.reports) == 4
    assert all(
        Path(reported.pointer["path"], "manifest.json").is_file()
        for _, reported in train.reports
        if reported is not None
    )
    last = train.reports[-1][1]
    assert last is not None
    assert last.pointer["step"] == 6


def test_there_is_one_report_although_it_is_added_twice(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    with RayTrainReport():
        make_trainer(tmp_path, callbacks=[RayTrainReport()]).fit(BATCHES)
    assert [metrics["step"] for metrics, _ in train.reports] == [6]


def test_a_node_that_ray_takes_away_causes_a_checkpoint(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    train.preempted_at = 3
    logging = Logging(log_steps=1)
    trainer = make_trainer(tmp_path, callbacks=[RayTrainReport()], logging=logging)
    trainer.fit(BATCHES)
    assert (tmp_path / "checkpoint_3").is_dir()
    assert train.asked == 3
    assert trainer.global_step == 6


def test_a_worker_that_ray_has_started_again_resumes_from_the_newest_checkpoint(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    first = make_trainer(tmp_path, checkpoint=Checkpoint(steps=2))
    first.fit(BATCHES)
    train.is_restart = True
    again = make_trainer(tmp_path, callbacks=[RayTrainReport()])
    again.fit(BATCHES, ckpt_path=tmp_path / "checkpoint_2")
    assert again.global_step == 6
    assert len(train.reports) == 1  # nothing was left to train


@pytest.mark.parametrize("has_ray", [True, False])
def test_it_has_no_effect_elsewhere(
    tmp_path: Path, train: FakeRayTrain, monkeypatch: pytest.MonkeyPatch, has_ray: bool
) -> None:
    train.is_worker = False
    if not has_ray:
        monkeypatch.delitem(sys.modules, "ray.train")
    make_trainer(tmp_path, callbacks=[RayTrainReport()]).fit(BATCHES)
    assert train.reports == []


def test_metrics_that_are_no_json_are_reported_as_text(tmp_path: Path, train: FakeRayTrain) -> None:
    class Logs(Callback):
        def on_train_end(self, trainer: Any, *args: Any) -> None:
            trainer.log_metrics(bad=float("nan"), tensor=torch.tensor(2.0), count=3)

    make_trainer(tmp_path, callbacks=[Logs(), RayTrainReport()]).fit(BATCHES)
    metrics = train.reports[-1][0]
    assert (metrics["bad"], metrics["tensor"], metrics["count"]) == ("nan", 2.0, 3)


def test_a_checkpoint_in_an_object_store_is_reported_by_its_url(
    tmp_path: Path, train: FakeRayTrain
) -> None:
    pytest.importorskip("obstore")
    trainer = make_trainer(
        "memory://ray-train-report/run",  # type: ignore[arg-type]
        callbacks=[RayTrainReport()],
        checkpoint=Checkpoint(steps=6),
        object_store=ObjectStore(cache_dir=tmp_path),
    )
    trainer.fit(BATCHES)
    newest = "memory://ray-train-report/run/checkpoint_6"
    assert train.reports[-1][0]["checkpoint_path"] == newest
