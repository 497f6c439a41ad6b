"""Runs of two hosts that have only the object store in common: each has a local copy of its own."""

from __future__ import annotations

import shutil
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
from tests.distributed.ranks import free_port

pytestmark = pytest.mark.slow

_PARAMS = """
trainer:
  init:
    device: cpu
    seed: 1
    model: {{name: fc_mnist, hidden_sizes: [32], input_size: 64, dropout: 0.2}}
    optimizer: {{AdamW: {{lr: 0.001}}}}
    loop: {{max_steps: {steps}}}
    backend: {{parallel: {parallel}}}
    checkpoint: {{steps: 10, asynchronous: {asynchronous}}}
    callbacks: [{{KeepNCheckpoints: {{n: 2}}}}]
    progress: lines
    model_dir: {folder}
    object_store:
      lease_seconds: 30
      wait_seconds: 30
      options: {{endpoint: "http://127.0.0.1:{port}", region: us-east-1, retry_seconds: 2}}
  fit:
    train_dataloader: {{data_processor: DigitsProcessor, split: train, batch_size: 32}}
"""
_PATIENCE_S = 240
PARALLEL = {"ddp": "{replicate: -1}", "fsdp": "{shard: -1}"}


class Hosts:
    """Two hosts, each with a process and a home folder."""

    def __init__(self, folder: Path, environment: dict[str, str], port: int) -> None:
        self.folder = folder
        self.homes = [folder / "a", folder / "b"]
        self.environment = environment
        self.port = port
        self.options: dict[str, Any] = {
            "steps": 40,
            "parallel": PARALLEL["ddp"],
            "asynchronous": "false",
        }

    def start(self, model_dir: str, *words: str, **options: Any) -> Workers:
        """Start both processes: forked from one that has imported everything."""
        given = self.options | options
        for home in self.homes:
            home.mkdir(exist_ok=True, parents=True)
            text = _PARAMS.format(folder=model_dir, port=self.port, **given)
            (home / "params.yaml").write_text(text)
        master = str(free_port())

        def environ(rank: int) -> dict[str, str | None]:
            launched: dict[str, str | None] = {
                "HOME": str(self.homes[rank]),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_PORT": master,
                "TORCHELASTIC_USE_AGENT_STORE": None,  # each host has an agent of its own
            }
            return self.environment | launched

        each = [["fit", str(home / "params.yaml"), *words] for home in self.homes]
        return Workers(self.folder / "said", each, environ=environ)

    def run(self, model_dir: str, *words: str, code: int = 0, **options: Any) -> str:
        with self.start(model_dir, *words, **options) as workers:
            assert workers.codes(_PATIENCE_S) == [code, code], workers.said
            return workers.said

    def forget(self) -> None:
        """Lose both disks."""
        for home in self.homes:
            shutil.rmtree(home)


@pytest.fixture
def hosts(s3: S3Server, tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, s3.environment, s3.port)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> StoreUrl:
    name = request.node.name.replace("[", "-").strip("]")
    return StoreUrl("s3", BUCKET, f"hosts/{name}")


@pytest.fixture
def stored(
    s3: S3Server, url: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Read a checkpoint of the store, as a machine that has nothing."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)

    def read(step: int = 40) -> dict[str, Any]:
        mirror = open_mirror(url, cache_dir=tmp_path / "reader", options=s3.options)
        return state_of(fetch(mirror, f"checkpoint_{step}"))

    return read


def state_of(path: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint, by path, of the model and the optimizer."""
    found: dict[str, Any] = {}

    def visit(value: Any, name: str) -> None:
        if torch.is_tensor(value):
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{name}.{key}")

    state = checkpointing.load(path)
    visit({key: state[key] for key in ("model", "optimizer")}, "")
    assert len(found) > 4
    return found


@pytest.fixture
def whole(hosts: Hosts, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the state of the same run in one shared folder, without interruption."""

    def run(**options: Any) -> dict[str, Any]:
        hosts.run(str(tmp_path / "whole"), **options)
        hosts.forget()
        return state_of(tmp_path / "whole/checkpoint_40")

    return run


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def names_of(s3: S3Server, url: StoreUrl) -> list[str]:
    names = [one.name for one in open_store(url, s3.options).list("")]
    return sorted(name.split("/")[0] for name in names if name.endswith("/manifest.json"))


# CI: each engine, and each way to save.
@pytest.mark.soak_cases("ddp-true", "fsdp-false")
@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_they_end_as_with_a_shared_folder(
    hosts: Hosts,
    url: StoreUrl,
    s3: S3Server,
    whole: Any,
    stored: Any,
    parallel: str,
    asynchronous: str,
) -> None:
    hosts.options |= {"parallel": parallel, "asynchronous": asynchronous}
    expected = whole()
    hosts.run(str(url))
    assert_equal(stored(), expected)
    assert {"checkpoint_30", "checkpoint_40"} <= set(names_of(s3, url))
    for home in hosts.homes:  # nothing is left of the uploads
        assert not list(home.glob(".cache/modelzoo_trainer/stores/*/.store/share-*"))


_OWN = """
import time
from pathlib import Path
import torch
from modelzoo_trainer import Callback

class Stop(Callback):
    def on_step_committed(self, trainer):
        while trainer.global_step == 25:
            time.sleep(0.1)

class Wait(Callback):
    def on_step_committed(self, trainer):
        while trainer.global_step == 15 and not Path(__file__).with_name("go").exists():
            time.sleep(0.1)

class Score(Callback):
    def on_step_boundary(self, trainer):
        trainer.log_metrics(score=float(abs(trainer.global_step - 13)))

class Spoil(Callback):
    is_done = False

    @torch.no_grad()
    def on_step_committed(self, trainer):
        if trainer.global_step == 25 and not self.is_done:
            self.is_done = True
            for parameter in trainer.model.parameters():
                parameter.mul_(float("nan"))
"""


def callbacks(hosts: Hosts, text: str) -> str:
    """Return the option with these callbacks, which may be those above."""
    for home in hosts.homes:
        home.mkdir(exist_ok=True, parents=True)
        (home / "own.py").write_text(_OWN)
    return f"init.callbacks=[{text}]"


def stop(hosts: Hosts) -> str:
    """Return the option that makes a run wait at step 25, for ever."""
    return callbacks(hosts, "{KeepNCheckpoints: {n: 2}}, {own.Stop: {}}")


def wait_and_stop(hosts: Hosts) -> str:
    """Return likewise one with which it also waits at step 15, until `go_on`."""
    return callbacks(hosts, "{KeepNCheckpoints: {n: 2}}, {own.Wait: {}}, {own.Stop: {}}")


def go_on(hosts: Hosts) -> None:
    for home in hosts.homes:
        (home / "go").touch()


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_killed_they_resume_exactly_without_their_disks(
    hosts: Hosts, url: StoreUrl, s3: S3Server, whole: Any, stored: Any, parallel: str
) -> None:
    hosts.options["parallel"] = parallel
    expected = whole()
    with hosts.start(str(url), "--set", stop(hosts)) as workers:  # which kills them
        workers.wait_until(lambda: "checkpoint_20" in names_of(s3, url), _PATIENCE_S)
    hosts.forget()
    out = hosts.run(str(url))
    assert "checkpoint_20" in out
    assert_equal(stored(), expected)


def test_each_host_downloads_its_own_shard_only(hosts: Hosts, url: StoreUrl) -> None:
    hosts.options["parallel"] = PARALLEL["fsdp"]
    hosts.run(str(url))
    hosts.forget()
    hosts.run(str(url), steps=41)
    for rank, home in enumerate(hosts.homes):
        shards = home.glob(".cache/modelzoo_trainer/stores/*/checkpoint_40/shard-*")
        assert [path.name for path in shards] == [f"shard-{rank:05d}.safetensors"]


# CI: each engine, and each rank.
@pytest.mark.soak_cases("ddp-1", "fsdp-0")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_damage_that_one_host_finds_makes_all_use_an_older_checkpoint(
    hosts: Hosts, url: StoreUrl, s3: S3Server, whole: Any, stored: Any, parallel: str, rank: int
) -> None:
    hosts.options["parallel"] = parallel
    expected = whole()
    hosts.run(str(url), steps=30)
    hosts.forget()
    store = open_store(url, s3.options)
    (name,) = (
        one.name
        for one in store.list("checkpoint_30")
        if one.name.endswith(f"/shard-{rank:05d}.safetensors")
    )
    data = bytearray(store.read(name)[0])
    data[-1] ^= 1
    store.put(name, bytes(data))
    out = hosts.run(str(url))
    assert out.count("Skipped ") == 1
    assert f"shard-{rank:05d}.safetensors" in out
    assert_equal(stored(), expected)


def test_hosts_change_places(
    hosts: Hosts, url: StoreUrl, s3: S3Server, whole: Any, stored: Any
) -> None:
    """Each host has an old copy: of what was uploaded, and of a run that was never uploaded."""
    hosts.options["parallel"] = PARALLEL["fsdp"]
    expected = whole()
    with hosts.start(str(url), "--set", stop(hosts)) as workers:  # which kills them
        workers.wait_until(lambda: "checkpoint_20" in names_of(s3, url), _PATIENCE_S)
    hosts.homes.reverse()
    old = hosts.homes[1]  # the main process was here
    (folder,) = old.glob(".cache/modelzoo_trainer/stores/*")
    for step in (20, 30):  # with other contents than those of the store
        shutil.rmtree(folder / f"checkpoint_{step}", ignore_errors=True)
        checkpointing.save(folder / f"checkpoint_{step}", {"model": {}}, step=step)
    out = hosts.run(str(url))
    assert "checkpoint_20" in out
    assert_equal(stored(), expected)


@pytest.mark.parametrize("loses_disks", [False, True])
def test_killed_before_the_manifest_is_in_the_store(
    hosts: Hosts,
    url: StoreUrl,
    s3: S3Server,
    proxy: FaultProxy,
    whole: Any,
    stored: Any,
    loses_disks: bool,
) -> None:
    """A checkpoint that the main process has committed is completed by its next run."""
    hosts.options["parallel"] = PARALLEL["fsdp"]
    expected = whole()
    proxy.choose = lambda kind, target: (
        "503" if kind == "create" and "checkpoint_20/manifest.json" in target else None
    )
    hosts.port = proxy.port
    with hosts.start(str(url), "--set", wait_and_stop(hosts)) as workers:  # which kills them
        # a newer one would be uploaded before it
        workers.wait_until(lambda: "checkpoint_10" in names_of(s3, url), _PATIENCE_S)
        go_on(hosts)
        workers.wait_until(lambda: any(one.fault == "503" for one in proxy.requests), _PATIENCE_S)
    assert "checkpoint_20" not in names_of(s3, url)
    proxy.choose = lambda kind, target: None
    if loses_disks:
        hosts.forget()
    else:
        shutil.rmtree(hosts.homes[1])
    out = hosts.run(str(url))
    newest = "checkpoint_10" if loses_disks else "checkpoint_20"
    assert "Loaded checkpoint" in out
    assert newest in out
    assert_equal(stored(), expected)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_one_failed_upload_of_the_other_host_fails_that_save_only(
    hosts: Hosts,
    url: StoreUrl,
    s3: S3Server,
    proxy: FaultProxy,
    whole: Any,
    stored: Any,
    asynchronous: str,
) -> None:
    hosts.options |= {"parallel": PARALLEL["fsdp"], "asynchronous": asynchronous}
    expected = whole()
    proxy.choose = lambda kind, target: (
        "503" if kind == "put" and "checkpoint_20/" in target and "-00001." in target else None
    )
    hosts.port = proxy.port
    out = hosts.run(str(url))
    assert "NO CHECKPOINT WAS SAVED" in out
    assert "in process 1" in out
    assert "checkpoint_20" not in names_of(s3, url)
    assert_equal(stored(), expected)


def test_uploads_of_the_other_host_that_always_fail_leave_no_checkpoint(
    hosts: Hosts, url: StoreUrl, s3: S3Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    hosts.options["parallel"] = PARALLEL["fsdp"]
    proxy.choose = lambda kind, target: "503" if kind == "put" and "-00001." in target else None
    hosts.port = proxy.port
    out = hosts.run(str(url), code=1)  # the last checkpoint must succeed
    assert out.count("NO CHECKPOINT WAS SAVED") >= 3
    assert names_of(s3, url) == []
    (folder,) = hosts.homes[0].glob(".cache/modelzoo_trainer/stores/*")
    assert not list(folder.glob("checkpoint_*"))


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_callbacks_roll_back_and_write_and_load_checkpoints_of_their_own(
    hosts: Hosts, url: StoreUrl, s3: S3Server, stored: Any, tmp_path: Path, parallel: str
) -> None:
    hosts.options["parallel"] = parallel
    given = (
        "{KeepNCheckpoints: {n: 2}}, {CheckLoss: {policy: rollback}}, {own.Spoil: {}}, "
        "{own.Score: {}}, {SaveBest: {metric: score, load_best: true}}, "
        "{ExtraCheckpoint: {steps: 15}}"
    )
    hosts.run(str(tmp_path / "whole"), "--set", callbacks(hosts, given))
    expected = state_of(tmp_path / "whole/checkpoint_40")
    hosts.forget()
    out = hosts.run(str(url), "--set", callbacks(hosts, given))
    assert "checkpoint_20" in out
    assert "Loaded the weights of step" in out
    assert_equal(stored(), expected)
    names = [one.name for one in open_store(url, s3.options).list("extra")]
    assert "extra/extra_30/manifest.json" in names


def test_files_that_one_host_would_make_of_the_shards_of_all_are_refused(
    hosts: Hosts, url: StoreUrl
) -> None:
    hosts.options["parallel"] = PARALLEL["fsdp"]
    given = callbacks(hosts, "{ExtraCheckpoint: {steps: 5, file_format: safetensors}}")
    out = hosts.run(str(url), "--set", given, code=2)
    assert "ExtraCheckpoint with file_format: safetensors makes files of weights" in out
    assert "cache_dir" in out
    assert "Traceback" not in out
