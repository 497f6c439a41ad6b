"""Whole runs on an XLA device, by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelzoo_trainer import checkpointing

Run = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def losses_of(folder: Path, key: str = "loss") -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row[key] for row in map(json.loads, lines) if key in row}


def tensors_of(folder: Path, step: int) -> dict[str, Any]:
    state = checkpointing.load(folder / f"checkpoint_{step}")
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for idx, own in state["optimizer"]["state"].items():
        found |= {f"optimizer.{idx}.{name}": value for name, value in own.items()}
    return found


def same_bits(one: Path, other: Path, step: int) -> bool:
    mine, others = tensors_of(one, step), tensors_of(other, step)
    return mine.keys() == others.keys() and all(
        value.dtype == others[name].dtype and value.equal(others[name])
        for name, value in mine.items()
    )


def test_a_run_agrees_with_the_hosts_and_continues_on_either(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    # Dropout draws other numbers on another device.
    params["trainer"]["init"]["model"]["dropout"] = 0.0
    whole = {}
    for device in ("cpu", "xla"):
        folder = tmp_path / device
        done = run(params, "--device", device, "--model_dir", str(folder))
        assert done.returncode == 0, done.stderr
        whole[device] = losses_of(folder)
    assert whole["xla"] == pytest.approx(whole["cpu"], rel=1e-4)
    assert list(whole["xla"]) == list(range(1, 13))
    for device, other in (("cpu", "xla"), ("xla", "cpu")):
        folder = tmp_path / f"{device}-{other}"
        half = tmp_path / device / "checkpoint_8"
        done = run(
            params, "--device", other, "--model_dir", str(folder), "--checkpoint_path", str(half)
        )
        assert done.returncode == 0, done.stderr
        rest = {step: loss for step, loss in whole[other].items() if step > 8}
        assert losses_of(folder) == pytest.approx(rest, rel=1e-4)


KILL = """\
import os, signal
from modelzoo_trainer import Callback, register_global_callback

class Kill(Callback):
    def on_step_boundary(self, trainer):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

register_global_callback(Kill())
"""


def test_a_run_that_was_killed_goes_on_with_the_same_bits(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    done = run(params, "--model_dir", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    killed = tmp_path / "killed"
    (tmp_path / "zoo_kill.py").write_text(KILL)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(params, "--model_dir", str(killed), "--import", "zoo_kill", PYTHONPATH=path)
    assert done.returncode == -9, done.stderr
    assert (killed / "checkpoint_4").exists()
    assert not (killed / "checkpoint_8").exists()
    again = run(params, "--model_dir", str(killed))
    assert again.returncode == 0, again.stderr
    assert same_bits(tmp_path / "whole", killed, 12)
    assert losses_of(killed) == losses_of(tmp_path / "whole")


def test_compiling_alone_writes_nothing_and_says_what_was_compiled(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = run(params, "--compile-only", "--model_dir", str(folder))
    assert done.returncode == 0, done.stderr
    assert re.search(r"Compiled graphs: \d+", done.stdout + done.stderr)
    assert not folder.exists()


def test_a_shape_that_changes_is_warned_of_once_with_the_remedy(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    fit = params["trainer"]["fit"]
    fit["train_dataloader"] |= {"drop_last": False, "batch_size": 500}
    params["trainer"]["init"]["loop"] |= {"grad_accum_steps": 1}
    done = run(params, "--model_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was recompiled because the shapes of batches have changed") == 1
    assert "[0] (438, 8, 8), [1] (438,) after [0] (500, 8, 8), [1] (500,)" in done.stderr
    assert "drop_last" in done.stderr


def test_a_shape_that_changes_ends_the_run_if_that_is_asked_for(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    init, fit = params["trainer"]["init"], params["trainer"]["fit"]
    fit["train_dataloader"] |= {"drop_last": False, "batch_size": 500}
    init["loop"] |= {"grad_accum_steps": 1}
    init["backend"] = {"recompilation": "error"}
    done = run(params, "--model_dir", str(tmp_path / "run"))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("RecompilationError: A step was recom")
    assert "Traceback" not in done.stderr


def test_float16_is_refused_with_the_reason(
    run: Run, params: dict[str, Any], tmp_path: Path
) -> None:
    params["trainer"]["init"]["precision"] = {"fp16_type": "float16"}
    done = run(params, "--model_dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "fp16_type float16 does not work on xla:0" in done.stderr
    assert "Use bfloat16" in done.stderr


def test_a_process_whose_autograd_has_begun_without_the_device_is_refused() -> None:
    program = """
import torch
from backends import BackendUnavailable, make_backend
torch.ones(1, requires_grad=True).sum().backward()
try:
    make_backend("xla").open()
except BackendUnavailable as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "Call torch_xla.device()" in done.stdout


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"compile": True}, "torch.compile does not apply to XLA devices"),
        ({"recompilation": "raise"}, "backend.recompilation: expected"),
        ({"acumulation": "step"}, "Did you mean 'accumulation'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_with_its_line(
    run: Run, params: dict[str, Any], tmp_path: Path, backend: dict[str, Any], said: str
) -> None:
    params["trainer"]["init"]["backend"] = backend
    done = run(params, "--check")
    assert done.returncode == 2
    assert said in done.stderr
    assert "params.yaml:" in done.stderr


def test_the_quickstart_learns_as_on_the_host(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "xla"):
        folder = tmp_path / device
        text = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
        init = yaml.safe_load(text)["trainer"]["init"]
        assert init["precision"]["enabled"] is False  # float32
        done = subprocess.run(
            [
                *(sys.executable, "run.py", "--params", "configs/quickstart.yaml"),
                *("--device", device, "--model_dir", str(folder), "--mode", "train"),
                *("--set", "init.loop.eval_frequency=0", "--set", "init.logging.log_steps=1"),
                *("--max_steps", "50", "--set", "init.callbacks=[]"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found[device] = losses_of(folder)
    assert len(found["xla"]) == 50
    assert found["xla"] == pytest.approx(found["cpu"], rel=1e-3)
