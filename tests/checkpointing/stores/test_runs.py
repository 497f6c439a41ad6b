"""Whole runs on an S3 server, from the command line: killed, cut off, in several processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.stores.mirror import open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import fetch
from modelzoo_trainer.checkpointing.stores.store import open_store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from tests.checkpointing.stores.fault_proxy import FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, S3Server
from tests.distributed.launching import Workers
from tests.distributed.ranks import environment

pytestmark = pytest.mark.slow

_PARAMS = """
trainer:
  init:
    device: cpu
    seed: 1
    model: {{name: fc_mnist, hidden_sizes: [{size}], input_size: 64, dropout: 0.2}}
    optimizer: {{AdamW: {{lr: 0.001}}}}
    loop: {{max_steps: 40}}
    checkpoint: {{steps: 10}}
    callbacks: [{{KeepNCheckpoints: {{n: 2}}}}]
    progress: lines
    model_dir: {folder}
    object_store:
      lease_seconds: 30
      wait_seconds: {wait_s}
      options: {{endpoint: "http://127.0.0.1:{port}", region: us-east-1}}
  fit:
    train_dataloader: {{data_processor: DigitsProcessor, split: train, batch_size: 32}}
"""
_SIGKILL_S = 120


class Machine:
    """A machine with a local copy of its own."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str]) -> None:
        self.folder = folder
        self.port = port
        self.environment = environment | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
        folder.mkdir(exist_ok=True)

    def start(
        self, model_dir: str, *options: str, processes: int = 1, size: int = 32, wait_s: float = 60
    ) -> Workers:
        """Start a run in processes that are forked from one that has imported everything."""
        words = self.words(model_dir, *options, size=size, wait_s=wait_s)
        launched = {} if processes > 1 else dict.fromkeys(environment(0, 1, 0))  # unset
        env = launched | self.environment
        return Workers(self.folder / "said", words, processes, environ=lambda rank: env)

    def words(self, model_dir: str, *options: str, size: int = 32, wait_s: float = 60) -> list[str]:
        """Write the file, and return what comes after the command's name."""
        params = self.folder / "params.yaml"
        text = _PARAMS.format(folder=model_dir, port=self.port, size=size, wait_s=wait_s)
        params.write_text(text, encoding="utf-8")
        return ["fit", str(params), *options]

    def run(self, model_dir: str, *options: str, code: int = 0, **more: Any) -> str:
        with self.start(model_dir, *options, **more) as workers:
            assert set(workers.codes(240)) == {code}, workers.said
            return workers.said


@pytest.fixture
def machine(s3: S3Server, tmp_path: Path) -> Callable[..., Machine]:
    def make(name: str, port: int | None = None, **environment: str) -> Machine:
        return Machine(tmp_path / name, port or s3.port, s3.environment | environment)

    return make


@pytest.fixture
def url(request: pytest.FixtureRequest) -> StoreUrl:
    return StoreUrl("s3", BUCKET, f"runs/{request.node.name.replace('[', '-').strip(']')}")


@pytest.fixture
def whole(machine: Callable[..., Machine], tmp_path: Path) -> dict[str, Any]:
    """Return the model of the same run in a folder, without interruption."""
    machine("whole").run(str(tmp_path / "whole/run"))
    return model_of(checkpointing.load(tmp_path / "whole/run/checkpoint_40"))


def model_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state["model"].items() if torch.is_tensor(value)}


def stored(
    s3: S3Server, url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int = 40
) -> dict[str, Any]:
    """Return the model of a checkpoint in the store, as a machine that has nothing reads it."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    mirror = open_mirror(url, cache_dir=tmp_path / "reader", options=s3.options)
    return model_of(checkpointing.load(fetch(mirror, f"checkpoint_{step}")))


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def names_of(s3: S3Server, url: StoreUrl) -> set[str]:
    names = [one.name for one in open_store(url, s3.options).list("")]
    return {name.split("/")[0] for name in names if name.endswith("/manifest.json")}


def test_ends_as_in_a_folder(
    machine: Any, s3: S3Server, url: StoreUrl, whole: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    machine("one").run(str(url))
    assert_equal(stored(s3, url, tmp_path, monkeypatch), whole)
    assert names_of(s3, url) == {"checkpoint_30", "checkpoint_40"}


def test_killed_during_an_upload_another_machine_resumes(
    machine: Any,
    s3: S3Server,
    url: StoreUrl,
    proxy: FaultProxy,
    whole: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    seen: list[str] = []  # the first one is uploaded, whichever is the newest then

    def choose(kind: str, target: str) -> str | None:
        found = re.search(r"checkpoint_\d+", target)
        if found is None or kind not in ("put", "part"):
            return None
        seen.append(found[0])
        return None if found[0] == seen[0] else "stall"

    proxy.choose = choose
    with machine("one", proxy.port).start(str(url)) as run:  # which kills it
        run.wait_until(lambda: any(one.fault == "stall" for one in proxy.requests), _SIGKILL_S)
    proxy.choose = lambda kind, target: None
    assert names_of(s3, url) == {seen[0]}
    out = machine("other").run(str(url))
    assert seen[0] in out
    assert_equal(stored(s3, url, tmp_path, monkeypatch), whole)


def test_processes_change_between_machines(
    machine: Any, s3: S3Server, url: StoreUrl, tmp_path: Path, monkeypatch: Any
) -> None:
    for folder in (str(tmp_path / "folder"), str(url)):
        machine("one").run(folder, "--max_steps", "20", processes=2)
        machine("other").run(folder)
    expected = model_of(checkpointing.load(tmp_path / "folder/checkpoint_40"))
    assert_equal(stored(s3, url, tmp_path, monkeypatch), expected)


def test_expired_token_does_not_end_the_training(
    machine: Any,
    s3: S3Server,
    url: StoreUrl,
    proxy: FaultProxy,
    whole: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    num = 0

    def choose(kind: str, target: str) -> str | None:
        nonlocal num
        num += "checkpoint_" in target
        return "expired" if 1 <= num <= 6 and "checkpoint_" in target else None

    proxy.choose = choose
    out = machine("one", proxy.port).run(str(url))
    assert "UPLOADS FAIL" in out
    assert "expired" in out
    assert "work again" in out
    assert_equal(stored(s3, url, tmp_path, monkeypatch), whole)


def test_sigterm_with_a_store_that_hangs_keeps_its_exit_code(
    machine: Any,
    s3: S3Server,
    url: StoreUrl,
    proxy: FaultProxy,
    whole: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    proxy.choose = lambda kind, target: "503" if "checkpoint_" in target else None
    one = machine("one", proxy.port)
    with one.start(str(url), "--max_steps", "1000000", wait_s=2) as run:
        run.wait_until(lambda: any("checkpoint_" in one.target for one in proxy.requests))
        run.send(0, signal.SIGTERM)
        assert run.codes(200) == [143], run.said
        assert "checkpoint upload" in run.said
    assert names_of(s3, url) == set()


@pytest.mark.parametrize(
    ("environment", "port", "message", "code"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "the credentials are not accepted", 2),
        ({}, 9, "the endpoint cannot be reached", 1),  # a restart may succeed
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    machine: Any, environment: dict[str, str], port: int | None, message: str, code: int
) -> None:
    out = machine("one", port, **environment).run(f"s3://{BUCKET}/run", code=code)
    assert message in out
    assert "Traceback" not in out
    assert out.count("\n") <= 2


def test_second_run_waits_for_a_dead_one_and_refuses_a_live_one(
    machine: Any, s3: S3Server, url: StoreUrl, monkeypatch: Any
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with machine("one").start(str(url), "--max_steps", "1000000") as first:  # which kills it
        first.wait_until(lambda: bool(names_of(s3, url)))
        out = machine("other").run(str(url), code=2)
        assert f"process {first.pids[0]} on" in out
    newest = max(int(name.split("_")[1]) for name in names_of(s3, url))
    machine("other").run(str(url), "--max_steps", str(newest + 10))
    assert f"checkpoint_{newest + 10}" in names_of(s3, url)


def test_supervised_run_is_restarted_on_its_store(
    machine: Any, s3: S3Server, url: StoreUrl, whole: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    one = machine("one")
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from modelzoo_trainer import Callback\n"
        "class Kill(Callback):\n"
        "    def on_step_committed(self, trainer):\n"
        "        mark = Path(__file__).with_name('killed')\n"
        "        if trainer.global_step == 25 and not mark.exists():\n"
        "            mark.touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (one.folder / "killing.py").write_text(code)
    words = one.words(
        str(url),
        "--set",
        "init.autorestart.max_num_restarts=2",
        "--set",
        "init.callbacks=[{KeepNCheckpoints: {n: 2}}, {killing.Kill: {}}]",
    )
    done = subprocess.run(
        [sys.executable, "-m", "modelzoo_trainer", *words],
        env=os.environ | one.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    out = done.stdout
    assert done.returncode == 0, out
    assert (one.folder / "killed").exists()
    assert "autorestart" in out
    assert_equal(stored(s3, url, tmp_path, monkeypatch), whole)
