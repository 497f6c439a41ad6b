"""A backend that a file names by the dotted path of its class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends import BackendError
from modelzoo_trainer import Trainer
from modelzoo_trainer.cli import main
from modelzoo_trainer.errors import ConfigError
from tests.doubles import TinyModel

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
trainer:
  init:
    backend: {backend_type: counting_backends.Counting, offset: 3}
    seed: 1
    model_dir: out
    model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 2}
    logging: {log_steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 4}
"""
MODULE = """\
from pathlib import Path

from backends.cpu import CpuBackend


class Counting(CpuBackend):
    name = "counting"

    def __init__(self, *, offset: int, **options):
        super().__init__(**options)
        self.num = offset

    def optimizer_step(self, optimizer, keep=None):
        super().optimizer_step(optimizer, keep)
        self.num += 1

    def close(self):
        Path(f"counted-{self.comm.rank}").write_text(f"{type(self).__name__} {self.num}")
        super().close()


class Absent(CpuBackend):
    @staticmethod
    def is_available():
        return False


class Other:
    pass


def __getattr__(name):
    if name == "Uncalled":
        return type(name, (CpuBackend,), {"reduce": lambda self, tensor, op: tensor})
    raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counting_backends", raising=False)
    Path("counting_backends.py").write_text(MODULE)
    Path("params.yaml").write_text(FILE)
    return tmp_path


def losses(folder: str = "out") -> list[float]:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def refused(capsys: Any, *words: str) -> str:
    assert main(["fit", "params.yaml", *words]) == 2
    assert not Path("out").exists()
    said: str = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_run_of_a_file_uses_the_backend_that_it_names(caplog: Any) -> None:
    assert main(["fit", "params.yaml"]) == 0
    assert " on counting (cpu), float32" in caplog.text
    assert " on cpu" not in caplog.text
    assert Path("counted-0").read_text() == "Counting 5"
    own = losses()
    changes = ["--set=init.backend=null", "--set=init.model_dir=cpu", "--device=cpu"]
    assert main(["fit", "params.yaml", *changes]) == 0
    assert " on cpu, float32" in caplog.text
    assert len(own) == 2
    assert losses("cpu") == own


@pytest.mark.parametrize(
    "words",
    [
        ["--device=counting_backends.Counting"],
        ["--set=init.device=counting_backends.Counting", "--set=init.backend.backend_type=null"],
    ],
)
def test_the_device_may_be_its_path(words: list[str]) -> None:
    assert main(["fit", "params.yaml", *words]) == 0
    assert Path("counted-0").read_text() == "Counting 5"


def test_a_trainer_takes_the_path_as_well(tmp_path: Path) -> None:
    options = {"backend_type": "counting_backends.Counting", "offset": 1}
    with Trainer(model=TinyModel, model_dir=tmp_path, backend=options) as trainer:
        assert trainer.backend.num == 1  # type: ignore[attr-defined]  # its own
    with pytest.raises(ConfigError, match=r"device: Other is not a backend"):
        Trainer(model=TinyModel, model_dir=tmp_path, device="counting_backends.Other")
    given = {"backend_type": "counting_backends.Other"}
    with pytest.raises(ConfigError, match=r"^backend\.backend_type: Other is not a backend"):
        Trainer(model=TinyModel, model_dir=tmp_path, backend=given)
    with pytest.raises(BackendError, match=r"^backend\.backend_type: 'gpuu' is not a backend"):
        Trainer(model=TinyModel, model_dir=tmp_path, backend={"backend_type": "gpuu"})
    with pytest.raises(BackendError, match="Absent is not available"):
        Trainer(model=TinyModel, model_dir=tmp_path, device="counting_backends.Absent")


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("counting_backend.Counting", ("Cannot import 'counting_backend'", "next to the YAML")),
        ("counting_backends.Countin", ("has no 'Countin'", "Did you mean 'Counting'?")),
        ("counting_backends.Other", ("Other is not a backend", "Derive it from backends.Backend")),
        ("math.sqrt", ("sqrt is not a backend", "Derive it from backends.Backend")),
        ("own", ("'own' is not a backend. Known: auto", "dotted path, e.g. package.module.Class")),
        ("m:Class", ("'m:Class' is not a backend", "dotted path, e.g. package.module.Class")),
        ("counting_backends.Uncalled", ("Uncalled.reduce is never called", "_make_comm")),
        ("backends.backend.Backend", ("Backend is not a complete backend", "device", "name")),
    ],
)
def test_a_path_without_a_backend_is_refused(
    capsys: Any, path: str, facts: tuple[str, ...]
) -> None:
    said = refused(capsys, f"--set=init.backend={{backend_type: '{path}'}}")
    assert said.count("trainer.init.backend.backend_type: ") == 1
    assert "trainer.init.device" not in said
    assert [fact for fact in facts if fact not in said] == []


def test_options_are_checked_in_the_file(capsys: Any) -> None:
    Path("params.yaml").write_text(FILE.replace("offset: 3", "offfset: 3"))
    said = refused(capsys)
    assert "params.yaml:3:" in said
    assert "trainer.init.backend.offfset: no such option of counting" in said
    assert "'offset'" in said
    Path("params.yaml").write_text(FILE.replace(", offset: 3", ""))
    assert "trainer.init.backend.offset: missing; Counting requires it" in refused(capsys)


def test_one_that_is_not_available_here_is_no_mistake_of_the_file(capsys: Any) -> None:
    change = "--set=init.backend={backend_type: counting_backends.Absent}"
    assert "Absent is not available" in refused(capsys, change)
    assert main(["check", "params.yaml", change]) == 2
    said = capsys.readouterr().out
    assert "valid, but cannot run here: Absent is not available" in said
    assert "missing: device 'counting_backends.Absent'" in said


@pytest.mark.slow
def test_it_runs_in_several_processes() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(ROOT / "run.py"), "fit", "params.yaml"]
    subprocess.run([sys.executable, *words], check=True, timeout=240)
    assert [Path(f"counted-{rank}").read_text() for rank in range(2)] == ["ParallelCounting 5"] * 2
    assert len(losses()) == 2
