"""`modelzoo-trainer launch`: checks, job files, and what is started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.tools.launch import jobs

ROOT = Path(__file__).resolve().parents[3]
FILE = """
trainer:
  init:
    device: {device}
    seed: 1
    model_dir: runs/a
    model: {{name: fc_mnist, hidden_sizes: [8], input_size: 64}}
    optimizer: {{SGD: {{lr: 0.1}}}}
    loop: {{max_steps: 20}}
    checkpoint: {{steps: 10}}
  fit:
    train_dataloader: {{data_processor: DigitsProcessor, split: train, batch_size: 16}}
"""
LAUNCHERS = {
    "local": [],
    "slurm": [],
    "ray": ["--nodes", "2"],
    "kubernetes": ["--image", "image:1", "--mount", "runs:/runs"],
    "skypilot": ["--gpus", "H100:2"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE.format(device="cpu"), encoding="utf-8")
    return tmp_path


def launch(*words: str) -> int:
    try:
        return main(["launch", *words])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else -1


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    code = launch(*words, "--dry-run")
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


# ---- job files


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_options_of_fit_are_in_each_job(
    folder: Path, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    words = ["--max_steps", "7", "params.yaml", "--set", "init.model_dir='$HOME @NAME@'"]
    text = printed(capsys, "--on", launcher, *LAUNCHERS[launcher], *words)
    given = ["params.yaml", "--max_steps", "7", "--set", "init.model_dir='$HOME @NAME@'"]
    found: list[str] = []
    if launcher == "ray":
        called: list[Any] = []
        body = text[text.index("worker(\n") : text.index("    torch_config")].rstrip(" \n,")
        eval(body, {"worker": lambda *words: called.extend(words)})
        found = called
    elif launcher == "kubernetes":
        job = list(yaml.safe_load_all(text))[1]
        found = job["spec"]["template"]["spec"]["containers"][0]["args"]
    else:
        command = yaml.safe_load(text)["run"] if launcher == "skypilot" else text
        found = shlex.split(command.replace("\\\n", " "), comments=True)
        found = found[found.index("fit") + 1 :]
    assert found[-5:] == given or found[:5] == given


@pytest.mark.parametrize(
    ("device", "words", "gpus"),
    [("cpu", [], 0), ("gpu", [], 2), ("auto", [], 2), ("gpu", ["--gpus", "4"], 4)],
)
def test_a_process_has_a_gpu_if_the_run_uses_them(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    device: str,
    words: list[str],
    gpus: int,
) -> None:
    Path("params.yaml").write_text(FILE.format(device=device), encoding="utf-8")
    options = [*LAUNCHERS["kubernetes"], "--processes-per-node", "2", *words]
    text = printed(capsys, "--on", "kubernetes", *options, "params.yaml")
    container = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu", 0) == gpus


@pytest.mark.parametrize(
    ("device", "words", "backend"),
    [
        ("cpu", [], "gloo"),
        ("gpu", [], "cpu:gloo,cuda:nccl"),
        ("auto", [], "cpu:gloo,cuda:nccl"),
        ("cpu", ["--gpus", "4"], "cpu:gloo,cuda:nccl"),
    ],
)
def test_ray_starts_process_groups_for_tensors_of_host_and_device(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    device: str,
    words: list[str],
    backend: str,
) -> None:
    Path("params.yaml").write_text(FILE.format(device=device), encoding="utf-8")
    text = printed(capsys, "--on", "ray", *LAUNCHERS["ray"], *words, "params.yaml")
    assert f'    torch_config=TorchConfig(backend="{backend}"),\n' in text


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS.keys() - {"ray"}))
def test_other_launchers_leave_process_groups_to_the_trainer(
    folder: Path, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    Path("params.yaml").write_text(FILE.format(device="gpu"), encoding="utf-8")
    text = printed(capsys, "--on", launcher, *LAUNCHERS[launcher], "params.yaml")
    assert re.findall("(?i)gloo|(?<!_)nccl", text) == []


def test_the_environment_of_this_python_is_activated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(folder / "my env"))
    assert jobs.active_environment() == []
    (folder / "my env/bin").mkdir(parents=True)
    (folder / "my env/bin/activate").touch()
    assert jobs.active_environment() == [f"source '{folder}/my env/bin/activate'"]
    (folder / "my env/conda-meta").mkdir()
    assert jobs.active_environment()[-1] == f"conda activate '{folder}/my env'"


@pytest.mark.parametrize("through", ["torchrun", "srun"])
def test_a_script_of_slurm_is_bash(
    folder: Path, capsys: pytest.CaptureFixture[str], through: str
) -> None:
    words = ["--through", through, "--partition", "gpu", "--processes-per-node", "4"]
    words += ["params.yaml", "--set", "init.model_dir='a b'"]
    text = printed(capsys, "--on", "slurm", *words)
    assert "#SBATCH --partition=gpu\n" in text
    assert f"#SBATCH --cpus-per-task={32 if through == 'torchrun' else 8}\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


# ---- invalid input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "pbs", "params.yaml"], "invalid choice: 'pbs'"),
        (["params.yaml"], "--on"),
        (["--on", "local", "--nodes", "2", "params.yaml"], "on this machine only"),
        (["--on", "slurm", "--nodes", "0", "params.yaml"], "--nodes: expected an integer >= 1"),
        (["--on", "ray", "--processes-per-node", "x", "params.yaml"], "--processes-per-node"),
        (["--on", "slurm", "absent.yaml"], "absent.yaml"),
        (["--on", "slurm"], "FILE"),
        (["--on", "slurm", "params.yaml", "--max_stepps", "3"], "--max_steps"),
        (["--on", "slurm", "params.yaml", "--set", "init.loop.max_step=3"], "max_steps"),
        (["--on", "kubernetes", "params.yaml"], "--image: required"),
        (["--on", "local", "--partition", "gpu", "params.yaml"], "--partition: no effect"),
        (["--on", "slurm", "--partition", "a b", "params.yaml"], "--partition: expected one word"),
        (["--on", "slurm", "--through", "job", "params.yaml"], "torchrun, srun"),
        (["--on", "ray", "--name", "My run", "params.yaml"], "--name"),
        (["--on", "ray", "--gpus", "H100", "params.yaml"], "--gpus: expected N or TYPE:N"),
        (["--on", "skypilot", "--mount", "runs", "params.yaml"], "--mount: expected SOURCE:PATH"),
        (["--on", "slurm", "--time", "1 day\n", "params.yaml"], "--time"),
        (["--on", "skypilot", "params.yaml", "--set", "init.seed=\n1"], "must be one line"),
        (["--on", "slurm", "--activate", "a\nb", "params.yaml"], "must be one line"),
    ],
)
def test_invalid_input_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert launch(*words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert [path.name for path in folder.iterdir()] == ["params.yaml"]


@pytest.mark.parametrize(
    ("launcher", "missing"),
    [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("skypilot", "sky"), ("ray", "ray[train]")],
)
def test_a_launcher_that_is_not_installed_is_named_with_dry_run(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    missing: str,
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("modelzoo_trainer.cli.launching.find_spec", lambda name: None)
    assert launch("--on", launcher, *LAUNCHERS[launcher], "params.yaml") == 2
    err = capsys.readouterr().err
    assert missing in err
    assert "--dry-run" in err
    assert len(err.splitlines()) == 1


# ---- submission


def make_tool(folder: Path, name: str, code: int = 0) -> None:
    """Make a program that writes down its arguments and what it reads."""
    path = folder / name
    text = f'#!/bin/bash\necho "$@" >{folder}/args\ncat "${{2:-/dev/stdin}}" >{folder}/read\n'
    if name == "kubectl":
        text = text.replace('"${2:-/dev/stdin}"', "/dev/stdin")
    path.write_text(f"{text}exit {code}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("launcher", "tool", "args"),
    [
        ("slurm", "sbatch", ""),
        ("kubernetes", "kubectl", "apply -f -"),
        ("skypilot", "sky", "launch"),
    ],
)
def test_what_is_submitted_is_what_a_dry_run_prints(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    tool: str,
    args: str,
) -> None:
    make_tool(folder, tool)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    words = ["--on", launcher, *LAUNCHERS[launcher], "params.yaml"]
    assert launch(*words) == 0
    assert (folder / "args").read_text(encoding="utf-8").strip().startswith(args)
    assert printed(capsys, *words) == (folder / "read").read_text(encoding="utf-8")


def test_a_refused_job_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(folder, "sbatch", code=3)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert launch("--on", "slurm", "params.yaml") == 3
    assert "no job was submitted" in capsys.readouterr().err


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "modelzoo_trainer", "launch", "--on", "local", *words]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_run_on_this_machine(folder: Path) -> None:
    process = start(folder, "--processes-per-node", "2", "params.yaml", "--max_steps", "6")
    assert process.communicate(timeout=120)[1].count("2 processes") <= 1
    assert process.returncode == 0
    assert len(list((folder / "runs/a/checkpoint_6").glob("shard-*.safetensors"))) == 2


@pytest.mark.slow
def test_a_signal_reaches_a_run_on_this_machine(folder: Path) -> None:
    words = ["--processes-per-node", "2", "params.yaml", "--max_steps", "1000000"]
    process = start(folder, *words)
    while not (folder / "runs/a/checkpoint_10").is_dir():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err  # torchrun's, whatever the processes end with
    newest = max((folder / "runs/a").glob("checkpoint_*"), key=lambda path: path.stat().st_mtime)
    assert int(newest.name.partition("_")[2]) % 10 != 0 or "SIGTERM" in err
