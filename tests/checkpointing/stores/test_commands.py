"""The commands of checkpoints on URLs."""

import itertools
from pathlib import Path
from typing import Final

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.stores.mirror import Mirror, open_mirror
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.store import open_store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.cli.checkpoints import main
from modelzoo_trainer.tools.report.command import main as report

_NUMBERS: Final = itertools.count()  # of buckets, which are kept in memory

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep local copies in a temporary folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Mirror:
    """Return the local copy of a run whose checkpoints are in a store, on another machine."""
    url = StoreUrl("memory", f"commands-{next(_NUMBERS)}", "runs/a")
    mirror = open_mirror(url, cache_dir=tmp_path / "other")
    for step in (1, 2):
        state = {"model": {"w": torch.full((3,), float(step))}, "global_step": step}
        checkpointing.save(mirror.path / f"checkpoint_{step}", state, step=step)
    Pusher(mirror, lambda: None).push()
    return mirror


def test_list_verify_and_info(run: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(run.url)]) == 0
    out = capsys.readouterr().out
    assert "checkpoint_1" in out
    assert "complete" in out
    assert main(["verify", f"{run.url}/checkpoint_2"]) == 0
    assert "intact (step 2" in capsys.readouterr().out
    assert main(["info", f"{run.url}/latest"]) == 0
    assert "step      2" in capsys.readouterr().out


def test_diff_and_export(run: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{run.url}/checkpoint_1", f"{run.url}/checkpoint_2"]) == 1
    assert "model.w" in capsys.readouterr().out
    file = tmp_path / "model.safetensors"
    assert main(["export", f"{run.url}/checkpoint_1", str(file)]) == 0
    assert torch.equal(checkpointing.read_weights(file)["w"], torch.ones(3))


def test_delete_deletes_in_the_store(run: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delete", f"{run.url}/checkpoint_1"]) == 0
    assert not open_store(run.url).list("checkpoint_1")
    assert main(["list", str(run.url)]) == 0
    assert "checkpoint_1" not in capsys.readouterr().out.split("deleted")[1]
    assert main(["delete", f"{run.url}/checkpoint_2"]) == 2
    assert "no intact checkpoint" in capsys.readouterr().err
    assert open_store(run.url).list("checkpoint_2")


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("/checkpoint_7", "checkpoint_7 does not exist"),
        ("/../x", "must not contain empty parts"),
        ("?key=1", "query or fragment"),
    ],
)
def test_what_is_not_there_is_refused(
    run: Mirror, suffix: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", f"{run.url}{suffix}"]) == 2
    assert message in capsys.readouterr().err


def test_upload(run: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointing.save(run.path / "checkpoint_3", {"model": {}}, step=3)
    (run.path / "metrics.jsonl").write_text("1\n")
    assert main(["upload", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.url}/checkpoint_3: uploaded\n"
    store = open_store(run.url)
    assert store.read("checkpoint_3/manifest.json")
    assert store.read("metrics.jsonl")[0] == b"1\n"
    assert main(["upload", str(run.path)]) == 0
    assert main(["upload", str(tmp_path)]) == 2
    assert "not the local copy" in capsys.readouterr().err


def test_interrupted_upload_is_not_a_checkpoint(
    run: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    run.store.delete(["checkpoint_2/manifest.json"])
    assert main(["info", f"{run.url}/checkpoint_2"]) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err


def test_report_of_a_run_in_a_store(
    run: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    (run.path / "metrics.jsonl").write_text('{"global_step": 1, "loss": 2.5}\n')
    Pusher(run, lambda: None).push()
    file = tmp_path / "report.html"
    assert report([str(run.url), "-o", str(file)]) == 0
    assert "1 run, 1 values" in capsys.readouterr().err
    (run.path / "metrics.jsonl").write_text('{"global_step": 1, "loss": 2.5, "lr": 1.0}\n')
    Pusher(run, lambda: None).push()
    assert report([str(run.url), "-o", str(file)]) == 0
    assert "1 run, 2 values" in capsys.readouterr().err
