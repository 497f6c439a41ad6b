"""The job files of the docs do what they say; Slurm and torchrun are doubles."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.distributed.launching import ROOT, wait_until

JOBS = ROOT / "docs" / "jobs"
_ACTIVATION = "source /shared/venv/bin/activate || exit 2\n"
_DOUBLES = {
    "scontrol": """
        case "$1 $2" in
            "show hostnames") echo localhost; echo node8 ;;
            "requeue $SLURM_JOB_ID") echo "$@" >> "$PLACE/scontrol"; kill -KILL $PPID ;;
        esac
    """,
    "scancel": 'echo "$@" >> "$PLACE/scancel"; kill -TERM "$(cat "$PLACE/torchrun.pid")"',
    "srun": 'shift; exec "$@"',  # --kill-on-bad-exit=1
    # Saves for a moment when it is told to end, and ends with 1, as torchrun does.
    "torchrun": """
        trap 'sleep 0.2; echo saved >> "$PLACE/saved"; exit 1' TERM
        printf '%s\\n' "$@" > "$PLACE/options"
        echo $$ > "$PLACE/pid"; mv "$PLACE/pid" "$PLACE/torchrun.pid"
        while [ ! -e "$PLACE/code" ]; do sleep 0.02; done
        exit "$(cat "$PLACE/code")"
    """,
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def job(tmp_path):
    """The Slurm job, with a torchrun that ends when a file has its exit code."""
    (tmp_path / "bin").mkdir()
    for name, text in _DOUBLES.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    env = {**os.environ, **slurm, "SLURM_CPUS_PER_TASK": "64", "PLACE": str(tmp_path)}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    text = (JOBS / "slurm.sbatch").read_text()
    assert _ACTIVATION in text
    (tmp_path / "job").write_text(text.replace(_ACTIVATION, ""))
    process = subprocess.Popen(["bash", "job"], env=env, cwd=tmp_path)
    wait_until(lambda: (tmp_path / "torchrun.pid").exists() or process.poll() is not None)
    yield process
    (tmp_path / "code").write_text("1")
    process.kill()
    process.wait()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_slurm_job_is_queued_again_when_its_time_is_nearly_over(tmp_path, job) -> None:
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == -signal.SIGKILL  # by Slurm, which starts it again
    assert read(tmp_path / "scancel") == "--signal=TERM 4711\n"
    assert read(tmp_path / "saved") == "saved\n"  # it has waited for that
    assert read(tmp_path / "scontrol") == "requeue 4711\n"


@pytest.mark.parametrize("code", [0, 1])
def test_the_slurm_job_that_is_done_or_fails_is_not(tmp_path, job, code) -> None:
    (tmp_path / "new").write_text(str(code))
    (tmp_path / "new").rename(tmp_path / "code")
    assert job.wait(30) == code
    assert read(tmp_path / "scontrol") == ""


def test_the_jobs_start_torchrun_with_options_that_it_has(tmp_path, job) -> None:
    [pods] = [
        one for one in yaml.safe_load_all(read(JOBS / "kubernetes.yaml")) if one["kind"] == "Job"
    ]
    [container] = pods["spec"]["template"]["spec"]["containers"]
    for words in (read(tmp_path / "options").split(), container["args"]):
        options = parse_args(words)
        assert (options.training_script, options.max_restarts) == ("modelzoo_trainer", 3)
        assert "params.yaml" in " ".join(options.training_script_args)
    options = parse_args(read(tmp_path / "options").split())
    assert (options.nnodes, options.rdzv_endpoint) == ("2", "localhost:24711")
