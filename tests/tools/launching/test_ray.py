"""Runs under Ray Train, on a cluster of Ray on this machine; needs ray[train]."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("pandas") is None, reason="needs ray[train]"
    ),
]

FILE = """
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: run
    model: {name: fc_mnist, hidden_sizes: [32], input_size: 64}
    optimizer: {AdamW: {lr: 0.001}}
    loop: {max_steps: 300}
    checkpoint: {steps: 100}
    logging: {log_steps: 50}
    callbacks: [{paced.Paced: {}}]
  fit:
    train_dataloader: {data_processor: DigitsProcessor, split: train, global_batch_size: 32}
    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 32}
"""

PACED = """
import os
import time

from modelzoo_trainer import Callback


class Paced(Callback):
    # Writes down how many processes there are, and gives the test time to disturb them: at step
    # n as long as there is a file `held_n`.

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        with open(trainer.model_dir / f"pid_{trainer.backend.comm.rank}", "w") as file:
            file.write(str(os.getpid()))
        if trainer.backend.comm.is_main:
            with open(trainer.model_dir / "sizes", "a") as file:
                file.write(f"{trainer.backend.comm.world_size}\\n")

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        time.sleep(0.01)
        held = trainer.model_dir.with_name(f"held_{trainer.global_step}")
        while held.exists():
            time.sleep(0.02)
"""

HEAD = """
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from modelzoo_trainer.cli.ray_worker import worker

LIGHT = {"object_store_memory": 80_000_000}
run = Path("run").absolute()


def wait_for(step):
    while not (run / f"checkpoint_{step}" / "manifest.json").exists():
        time.sleep(0.02)


def hold_at(step):
    held = Path(f"held_{step}").absolute()
    held.touch()
    return held


def fit(run_worker, num_workers=2, torch_config=None, **scaling):
    trainer = TorchTrainer(
        run_worker,
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=num_workers, **scaling),
        run_config=RunConfig(
            name="test", storage_path=os.path.abspath("ray"),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    result = trainer.fit()
    pointer = json.loads(Path(result.checkpoint.path, "checkpoint.json").read_text())
    found = {"metrics": result.metrics, "value": result.return_value, "pointer": pointer}
    Path("result.json").write_text(json.dumps(found))


"""

KILL = """
def kill():
    wait_for(100)
    os.kill(int((run / "pid_1").read_text()), signal.SIGKILL)
    held.unlink()


held = hold_at(150)
ray.init("local", num_cpus=2, include_dashboard=False, **LIGHT)
threading.Thread(target=kill, daemon=True).start()
fit(worker("params.yaml"))
ray.shutdown()
"""

STOP = """
def stop():
    wait_for(100)
    (run / "stop").touch()


ray.init("local", num_cpus=2, include_dashboard=False, **LIGHT)
threading.Thread(target=stop, daemon=True).start()
fit(worker("params.yaml", max_steps=100_000))
ray.shutdown()
"""

ELASTIC = """
held = hold_at(2400)
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "include_dashboard": False, **LIGHT},
)
node = cluster.add_node(num_cpus=1, **LIGHT)
ray.init(address=cluster.address)
thread = threading.Thread(
    target=fit,
    args=(worker("params.yaml", max_steps=2500), (1, 2)),
    kwargs={"elastic_resize_monitor_interval_s": 2},
    daemon=True,
)
thread.start()
wait_for(200)
cluster.remove_node(node, allow_graceful=False)
wait_for(500)
cluster.add_node(num_cpus=1, **LIGHT)
while len((run / "sizes").read_text().split()) < 3:
    time.sleep(0.1)
held.unlink()
thread.join()
ray.shutdown()
cluster.shutdown()
"""

PREEMPTED = """
held = hold_at(550)
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "include_dashboard": False, **LIGHT},
)
node = cluster.add_node(num_cpus=1, **LIGHT)
ray.init(address=cluster.address)
run_worker = worker("params.yaml", set={"init.checkpoint.steps": 1000, "init.loop.max_steps": 3000})
thread = threading.Thread(target=fit, args=(run_worker, (1, 2)), daemon=True)
thread.start()
while not (run / "sizes").exists():
    time.sleep(0.1)
command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
command += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
command += ["--reason-message", "test", "--deadline-remaining-seconds", "10"]
subprocess.run(command, check=True)
held.unlink()
thread.join()
ray.shutdown()
cluster.shutdown()
"""

DEVICES_ONLY = """
from dataclasses import dataclass

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from tests.virtual_backend import add_device
from tests.virtual_group import ENGINE, install_group


def prepare_worker():
    add_device()
    install_group(takes_host=False)


class OfDevice(_TorchBackend):
    def on_start(self, worker_group, backend_config):
        worker_group.execute(prepare_worker)
        super().on_start(worker_group, backend_config)


@dataclass
class DeviceConfig(TorchConfig):
    @property
    def backend_cls(self):
        return OfDevice


def run_and_count(config):
    from tests.virtual_group import sent  # of the worker, not of this process

    code = inner(config)
    rank = ray.train.get_context().get_world_rank()
    (run / f"sent_{rank}").write_text(json.dumps(sent))
    return code


add_device()
inner = worker("params.yaml", device="virtual", set={"init.backend": @SHARDED@})
ray.init("local", num_cpus=2, include_dashboard=False, **LIGHT)
fit(run_and_count, torch_config=DeviceConfig(backend=ENGINE))
ray.shutdown()
"""
SHARDED = {"parallel": {"shard": -1}, "sharding": {"meta_init": True}}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["-m", "modelzoo_trainer", "fit", "params.yaml"]

Record: TypeAlias = "Callable[[str, object], None]"

FASTER = {
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""How long Ray waits, and that it shows each line; no effect on what it does."""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        **FASTER,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def prepare(folder: Path) -> None:
    (folder / "params.yaml").write_text(FILE, encoding="utf-8")
    (folder / "paced.py").write_text(PACED, encoding="utf-8")


def run_driver(folder: Path, program: str) -> tuple[dict[str, Any], str]:
    """Run a program that starts Ray, and return the result and the output."""
    prepare(folder)
    (folder / "driver.py").write_text(HEAD + program, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-5000:]
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), process.stdout


def digests(checkpoint: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.glob("*.safetensors"))
    }


def test_a_killed_worker_resumes_and_ends_with_the_weights_of_torchrun(
    tmp_path: Path, record_property: Record
) -> None:
    ours, theirs = tmp_path / "ray", tmp_path / "torchrun"
    ours.mkdir()
    theirs.mkdir()
    result, output = run_driver(ours, KILL)
    prepare(theirs)
    subprocess.run(TORCHRUN, cwd=theirs, env=environment(), check=True, timeout=600)

    assert (ours / "run" / "sizes").read_text(encoding="utf-8").split() == ["2", "2"]
    shards = digests(ours / "run" / "checkpoint_300")
    assert len(shards) == 2
    assert shards == digests(theirs / "run" / "checkpoint_300")
    record_property("kills", 1)
    record_property("unequal", 0)

    newest = str(ours / "run" / "checkpoint_300")
    assert result["value"] == 0
    assert result["pointer"] == {"path": newest, "step": 300}
    assert result["metrics"]["checkpoint_path"] == newest
    assert result["metrics"]["step"] == 300
    assert 0 < result["metrics"]["validate_0/loss"] < 2

    # Once, although Ray shows what each worker logs. The killed attempt may not have come to it.
    said = re.findall(r"Saved checkpoint run/checkpoint_(\d+)", output)
    assert said[-2:] == ["200", "300"]
    assert said.count("200") == said.count("300") == 1


def test_a_stop_file_ends_the_run_for_good(tmp_path: Path) -> None:
    result, _ = run_driver(tmp_path, STOP)
    assert result["value"] == 143
    assert (tmp_path / "run" / "sizes").read_text(encoding="utf-8").split() == ["2"]
    step = result["metrics"]["step"]
    assert 100 <= step < 100_000
    assert result["pointer"] == {"path": str(tmp_path / "run" / f"checkpoint_{step}"), "step": step}


def test_workers_come_and_go(tmp_path: Path, record_property: Record) -> None:
    result, _ = run_driver(tmp_path, ELASTIC)
    record_property("resized", 2)
    assert (tmp_path / "run" / "sizes").read_text(encoding="utf-8").split() == ["2", "1", "2"]
    assert result["value"] == 0
    assert result["metrics"]["step"] == 2500


def test_a_node_that_is_about_to_be_taken_away_causes_a_checkpoint(
    tmp_path: Path, record_property: Record
) -> None:
    result, output = run_driver(tmp_path, PREEMPTED)
    record_property("preempted", 1)
    assert (tmp_path / "run" / "sizes").read_text(encoding="utf-8").split() == ["2", "1"]
    assert result["value"] == 0
    assert result["metrics"]["step"] == 3000
    steps = {int(path.name[11:]) for path in (tmp_path / "run").glob("checkpoint_*")}
    (on_notice,) = steps - {1000, 2000, 3000}
    assert on_notice % 50 == 0  # log_steps
    assert output.count("Ray is about to take a node away") == 1


def test_a_group_that_refuses_tensors_of_the_host_trains_a_sharded_model(tmp_path: Path) -> None:
    """Like NCCL alone, Ray's default on GPUs."""
    theirs = tmp_path / "on_cpu"
    theirs.mkdir()
    prepare(theirs)
    command = [*TORCHRUN, "--set", f"init.backend={json.dumps(SHARDED)}"]
    subprocess.run(command, cwd=theirs, env=environment(), check=True, timeout=600)
    lines = (theirs / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    [expected] = [one["validate_0/loss"] for one in found if "validate_0/loss" in one]

    result, _ = run_driver(tmp_path, DEVICES_ONLY.replace("@SHARDED@", repr(SHARDED)))
    assert result["value"] == 0
    assert result["metrics"]["validate_0/loss"] == pytest.approx(expected, rel=1e-4)
    for rank in range(2):
        sent = json.loads((tmp_path / "run" / f"sent_{rank}").read_text(encoding="utf-8"))
        assert sum(sent.values()) > 300  # at least one for each step
