"""One file that lists every callback and every logger trains, as it is run from a shell."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import checkpointing, loggers
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.positions import to_plain
from tests.callback_makers import ELSEWHERE, requires_arguments, shipped
from tests.callback_makers import EVERY as FILE


def trainers() -> list[dict[str, Any]]:
    found = to_plain(read_file(FILE))["trainer"]
    return [one["trainer"]["init"] for one in found]


def listed(key: str) -> list[str]:
    return [name for init in trainers() for one in init.get(key, ()) for name in one]


def classes(module: Any) -> list[str]:
    return [name for name in module.__all__ if isinstance(getattr(module, name), type)]


def test_the_file_lists_all_of_them_once():
    assert sorted(listed("loggers")) == sorted(classes(loggers))
    names = listed("callbacks")
    assert len(names) == len(set(names))
    assert set(names) | unlisted() == shipped().keys() - ELSEWHERE
    assert [name for name in unlisted() if requires_arguments(shipped()[name])] == []


def unlisted() -> set[str]:
    """Return the callbacks that are added to the first trainer of the file, without arguments."""
    return shipped().keys() - ELSEWHERE - set(listed("callbacks"))


def file_with_all(folder: Path) -> Path:
    """Return the file, or a copy with the callbacks that it does not list."""
    if not unlisted():
        return FILE
    found = to_plain(read_file(FILE))
    found["trainer"][0]["trainer"]["init"]["callbacks"] += [{name: {}} for name in unlisted()]
    path = folder / FILE.name
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def _nowhere(tmp_path, monkeypatch):
    """Metrics for services go into files, and messages nowhere."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it keeps the settings of the process's first run
    monkeypatch.chdir(tmp_path)
    for name in ("SLACK_BOT_TOKEN", "NOTIFICATION_PASSWORD", "NOTIFICATION_ENDPOINT"):
        monkeypatch.delenv(f"CEREBRAS_{name}", raising=False)
    for name, value in {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }.items():
        monkeypatch.setenv(name, value)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


QUICK = ["--set", "trainer[1].init.loggers=[]", "--set", "trainer[2].init.loggers=[]"]


@pytest.mark.slow
@pytest.mark.usefixtures("_nowhere")
@pytest.mark.filterwarnings("ignore")  # of other libraries, on their import
@pytest.mark.parametrize(
    "changes", [QUICK, pytest.param([], marks=pytest.mark.slow)], ids=["no_services", "whole"]
)
def test_it_trains(tmp_path, changes, caplog):
    for library in ("tensorboard", "peft") if changes else ("mlflow", "wandb"):
        pytest.importorskip(library)
    assert main(["--params", str(file_with_all(tmp_path)), *changes]) == 0
    for init in trainers():
        folder = tmp_path / init["model_dir"]
        assert checkpointing.read_manifest(folder / "checkpoint_3").step == 3
        losses = {line["step"]: line["loss"] for line in lines_of(folder) if "loss" in line}
        assert list(losses) == [1, 2, 3]
        assert all(map(math.isfinite, losses.values()))
        log = (folder / "logs/latest/run.log").read_text()
        assert "raised in" not in log
        assert "Traceback" not in log
    runs = tmp_path / "every_callback"
    for pattern in (
        "watching/act_dumps/act_dumps_1.npz",
        "watching/chrome_trace.json",
        "watching/events/events.*",
        "watching/logs/latest/available_tensor_names.txt",
        "watching/logs/latest/performance.json",
        "watching/metrics.csv",
        "acting/best_3/model.safetensors",
        "acting/extra/extra_2.safetensors",
        "acting/hf_3/config.json",
        "acting/logs/latest/sample.txt",
        "acting/model_checkpoint_2/model.safetensors",
        "acting/wsd/decayed_3.safetensors",
    ):
        assert list(runs.glob(pattern)), pattern
    for pattern in ("acting/wandb/offline-run-*/*.wandb", "mlflow/*/*/metrics/loss"):
        assert bool(list(runs.glob(pattern))) == (not changes), pattern
    assert not (runs / "acting/checkpoint_1").exists()
    assert "EmailNotification: failed to send a message: ConnectionRefusedError" in caplog.text
